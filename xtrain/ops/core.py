"""How an op is registered, and what the table of ops says about each.

Every op xtrain::<op> has a backward op xtrain::<op>_backward of its own, and each of the two has

    reference       plain PyTorch, the truth (of the pair: autograd through the forward reference)
    decomposition   plain PyTorch that inductor fuses with its neighbours (torch_compat)
    kernels         what eager runs on CPU and CUDA; the decomposition where nothing better exists
    fake            shape, dtype and strides, no values

No op aliases or mutates an input in any branch: a result is always fresh memory.

See-through or opaque: where an op's schema ends in `bool opaque=False`, inductor lowers its
decomposition and fuses it with its neighbours, unless the call says opaque=True: then the call
stays one call of the op's own kernel. The choice is part of the call, so that graphs show it and
compile caches know it; outside inductor it changes nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from xtrain import torch_compat
from xtrain.ops import launch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # what kernels of rows and dropout take
LIBRARY = torch.library.Library("xtrain", "DEF")
_decompositions: dict[torch._ops.OpOverload, Callable[..., Any]] = {}  # as the schema calls them


@dataclass(frozen=True)
class Op:
    """One row of `xtrain.ops.OPS`: what tests and benchmarks need to know of an op."""

    public: Callable[..., Any]  # the function users call
    reference: Callable[..., Any]  # same arguments as public; fp32 (fp64 for fp64) inside
    forward: torch._ops.OpOverload
    backward: torch._ops.OpOverload
    supports: Callable[..., str | None]  # same arguments as public; why the kernel cannot, or None
    # Same arguments as public: whether, where inductor compiles, the kernel beats the decomposition
    # on this device, dtype and class of shapes; bench/report_ops.py measures it.
    prefers_kernel: Callable[..., bool] = lambda *args, **kwargs: False

    @property
    def name(self) -> str:
        """What comes behind xtrain:: in its schema."""
        return self.forward._opname

    @property
    def decomposition(self) -> Callable[..., Any]:
        """What inductor sees through the forward; same arguments as it."""
        return _decompositions[self.forward]

    @property
    def backward_decomposition(self) -> Callable[..., Any]:
        """What inductor sees through the backward; same arguments as it."""
        return _decompositions[self.backward]


def define_op(
    schema: str,
    *,
    fake: Callable[..., Any],
    decomposition: Callable[..., Any],
    cpu: Callable[..., Any] | None = None,
    cuda: Callable[..., Any] | None = None,
    records: Sequence[Any] = (),
    replay_state: Callable[[], Any] = lambda: None,
) -> torch._ops.OpOverload:
    """Define xtrain::<schema> with its fake, its kernels and its lowering; return the overload.

    Args:     schema: functional: no alias or mutation marks; may end in `bool opaque=False`, which
              none of the functions below receives.
              fake: returns empty tensors with exactly the shape, dtype and strides of the kernels.
              decomposition: pure torch functions on the schema's arguments; traced with symbolic
              sizes, so it must not build tensors from data or branch on values.
              cpu, cuda: eager kernels; None means the decomposition. Where the schema has `opaque`,
              inductor's code calls cuda without the dispatcher (launch.py).
              records: NamedTuples. All functions here take those of the schema's arguments that
              are called like a record's fields as one record, in place of the first of them.
              replay_state: whatever cuda goes by beside its arguments: torch's switches.
    """
    name = schema[: schema.index("(")]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    overload = getattr(torch.ops.xtrain, name).default
    adapted = functools.partial(_adapted, overload, records)
    fake = adapted(fake)
    decomposition = _decompositions[overload] = adapted(decomposition)
    cpu, cuda = cpu and adapted(cpu), cuda and adapted(cuda)
    on_device = _on_its_device(cuda) if cuda else decomposition
    LIBRARY.impl(name, cpu or decomposition, "CPU")
    LIBRARY.impl(name, on_device, "CUDA")
    if cuda and torch_compat.position_of_opaque(overload) is not None:
        launch.CALLS[name] = launch.Replayed(overload, on_device, replay_state)
        torch_compat.call_in_inductors_code(
            overload,
            launch.__name__,
            f"CALLS[{name!r}]",
            lambda fixed: f"SITES[{name!r}, {fixed!r}]",
        )

    def fake_and_lower(*args: Any, **kwargs: Any) -> Any:
        torch_compat.flush_lowerings()
        return fake(*args, **kwargs)

    torch.library.register_fake(f"xtrain::{name}", fake_and_lower, lib=LIBRARY)
    torch_compat.lower_by_decomposition(overload, decomposition)
    return overload


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return c, in which ops compute: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def kernel_refuses(dtypes: Sequence[torch.dtype], **tensors: torch.Tensor) -> str | None:
    """Return why a Triton kernel for these dtypes cannot take these tensors, or None."""
    for name, tensor in tensors.items():
        if tensor.dtype not in dtypes:
            wide = "fp64, " if torch.float64 in dtypes else ""
            return f"{name} is {tensor.dtype}; the kernel takes {wide}fp32, bf16 and fp16"
    return None if torch_compat.has_triton() else "triton is not installed"


def opaque(prefers_kernel: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
    """Return what a public function passes as `opaque`: only a compiler ever reads it."""
    return torch.compiler.is_compiling() and prefers_kernel(*args, **kwargs)


def _adapted(
    overload: torch._ops.OpOverload, records: Sequence[Any], function: Callable[..., Any]
) -> Any:
    """Return `function` as the schema calls it: less `opaque`, its records put together."""
    position = torch_compat.position_of_opaque(overload)
    arguments = [(a.name, a.default_value) for a in overload._schema.arguments[:position]]
    parts = _parts([name for name, _ in arguments], records)

    @functools.wraps(function)
    def adapted(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop(torch_compat.OPAQUE, None)
        args = args[:position]
        if not records:
            return function(*args, **kwargs)
        args += tuple(kwargs.get(name, default) for name, default in arguments[len(args) :])
        return function(
            *(
                args[fields[0][1]] if record is None else record(**{n: args[i] for n, i in fields})
                for record, fields in parts
            )
        )

    return function if position is None and not records else adapted


def _parts(names: list[str], records: Sequence[Any]) -> list[tuple[Any, list[tuple[str, int]]]]:
    """Return (record or None, its fields or an argument, each with its place), in order."""
    parts: dict[Any, tuple[Any, list[tuple[str, int]]]] = {}
    for place, name in enumerate(names):
        record = next((record for record in records if name in record._fields), None)
        parts.setdefault(record or name, (record, []))[1].append((name, place))
    return list(parts.values())


def _on_its_device(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Launch on the GPU of the first argument: Triton launches on the current one."""

    @functools.wraps(kernel)
    def on_device(*args: Any, **kwargs: Any) -> Any:
        with torch.cuda.device_of(args[0]):
            return kernel(*args, **kwargs)

    return on_device


def define_autograd(
    op: torch._ops.OpOverload,
    backward: Callable[..., Any],
    setup_context: Callable[..., None],
) -> None:
    """Give op its derivative.

    Args:     backward: (ctx, *grad_outputs) -> one gradient or None per schema argument; calls
              xtrain::<op>_backward and nothing heavier, so that a compiled graph holds one node.
              setup_context: (ctx, inputs, output), with these parameter names: torch passes them
              by keyword.
    """
    kernel = torch_compat.autograd_kernel(op, backward, setup_context)
    LIBRARY.impl(op._opname, kernel, "Autograd", with_keyset=True)


def define_derivative(
    op: torch._ops.OpOverload,
    backward_op: torch._ops.OpOverload,
    *,
    outputs: Sequence[str] = (),
    transposes: bool = False,
) -> None:
    """Give op the derivative backward_op(gradient of the first result, ...).

    What else backward_op takes its schema's names say: arguments of op, results of op (`outputs`
    names them, where they are several), or as need_<argument>_grad whether that has a gradient. It
    returns the gradients of op's first arguments.

    Args:     transposes: backward_op is linear and its own derivative; else it has none.
    """
    arguments = [argument.name for argument in op._schema.arguments]
    places = {name: place for place, name in enumerate((*arguments, *outputs))}
    needs = {f"need_{name}_grad": place for place, name in enumerate(arguments)}
    taken = [(a.name, "Tensor" in str(a.type)) for a in backward_op._schema.arguments[1:]]
    tensors = [places[name] for name, is_tensor in taken if is_tensor]
    constants = [places[name] for name, is_tensor in taken if not is_tensor and name not in needs]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        values = (*inputs, *output) if outputs else inputs
        ctx.save_for_backward(*[values[place] for place in tensors])
        ctx.constants = [values[place] for place in constants]
        if outputs:
            ctx.mark_non_differentiable(*output[1:])

    def backward(ctx: Any, grad_out: Any, *_: Any) -> tuple[Any, ...]:
        saved, rest = iter(ctx.saved_tensors), iter(ctx.constants)
        wanted = ctx.needs_input_grad
        grads = backward_op(
            grad_out,
            *(
                wanted[needs[name]] if name in needs else next(saved if is_tensor else rest)
                for name, is_tensor in taken
            ),
        )
        grads = (grads,) if isinstance(grads, torch.Tensor) else grads
        unneeded = (None,) * (len(arguments) - len(grads))
        return *(g if want else None for g, want in zip(grads, wanted, strict=False)), *unneeded

    define_autograd(op, backward, setup_context)
    if transposes:
        define_autograd(backward_op, backward, setup_context)
    else:
        forbid_second_derivative(backward_op)


def define_masked_vmap(op: torch._ops.OpOverload, num_tensors: int, seed: int) -> None:
    """Map an op that drops elements over rows: the mask is that of the op on all rows together.

    The rows of a backward are cotangents of one value and share its mask: torch's loop over rows is
    right there.

    Args:     num_tensors: how many arguments, from the first on, have x's shape.
              seed: position of the seed; the offset stands behind it.
    """

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        if info.randomness == "same":
            raise RuntimeError(
                f"{op.name()} under vmap draws a mask for each row; for one mask in all rows "
                "(randomness='same') multiply by ops.dropout_mask, made outside of the vmap"
            )
        moved = [a if d is None else a.movedim(d, 0) for a, d in zip(args, in_dims, strict=True)]
        mapped = [d is not None for d in in_dims]
        if not any(mapped[num_tensors:]):
            rows = (info.batch_size,)
            whole = [
                a if is_mapped else a.expand(*rows, *a.shape)
                for a, is_mapped in zip(moved[:num_tensors], mapped, strict=False)
            ]
            return _on_first_dim(op(*whole, *moved[num_tensors:]))
        results = []
        for i in range(info.batch_size):
            row = [a[i] if is_mapped else a for a, is_mapped in zip(moved, mapped, strict=True)]
            if not mapped[seed] and not mapped[seed + 1]:
                row[seed + 1] = row[seed + 1] + i * row[0].numel()
            results.append(op(*row))
        if isinstance(results[0], tuple):
            return _on_first_dim(tuple(map(torch.stack, zip(*results, strict=True))))
        return _on_first_dim(torch.stack(results))

    torch.library.register_vmap(op.name(), rule, lib=LIBRARY)


def _on_first_dim(result: Any) -> Any:
    return result, tuple(0 for _ in result) if isinstance(result, tuple) else 0


def forbid_second_derivative(backward_op: torch._ops.OpOverload) -> None:
    """Make a derivative of backward_op raise; without this autograd would look into its kernels."""

    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        raise NotImplementedError(
            f"{backward_op.name()} has no derivative: for second derivatives differentiate the "
            "op's reference in plain PyTorch (xtrain.ops.OPS[name].reference)"
        )

    torch.library.register_autograd(backward_op.name(), backward, lib=LIBRARY)
