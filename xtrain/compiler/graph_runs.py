"""Run a graph op by op beside the step that it belongs to: same inputs, same random numbers.

    plain       in the graph's own dtypes
    in double   every float value in fp64, casts and autocast included: the truth of class E2, and
                where two spellings of a formula can be told apart whatever the dtype of training
    noisy       each result that is no integer off by up to half an ulp, or by a size that is given:
                what another implementation, as good as the first, may come to

Nothing of the step is disturbed: inputs are copied before it, generators put back after each run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from xtrain import torch_compat
from xtrain.passes.graph import TRANSPARENT_CALLS, body_operands, op_name, operand, tensor_meta
from xtrain.passes.swaps.account import accounts_of

_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
_RECOMPUTED = frozenset({"tag_activation_checkpoint", "wrap_activation_checkpoint"})
_RMS_NORMS = (F.rms_norm, torch.rms_norm)


class NotRepeatable(RuntimeError):
    """What a graph does cannot be done again in fp64, or with the same random numbers."""


@dataclass
class Tape:
    """What a graph's own random ops drew in its first run; later runs are given the same."""

    drawn: list[tuple[Any, Any]] = field(default_factory=list)
    is_recorded: bool = False
    position: int = 0

    def next(self, func: Any, result: Any) -> Any:
        """Note what an op drew just now, or return what it drew then; None if another op did."""
        if not self.is_recorded:
            self.drawn.append((func, pytree.tree_map_only(Tensor, Tensor.clone, result)))
            return result
        if self.position == len(self.drawn) or self.drawn[self.position][0] is not func:
            return None
        self.position += 1
        return self.drawn[self.position - 1][1]


class _Mode(torch_compat.PlainDispatchMode):
    """What a run changes of each op: its dtypes, its random numbers, its last digits."""

    supports_higher_order_operators = True

    def __init__(self, tape: Tape, *, in_double: bool, noise: float | None, seed: int):
        super().__init__()
        self.tape, self.in_double, self.noise, self.seed = tape, in_double, noise, seed
        self.generators: dict[torch.device, torch.Generator] = {}
        self.has_redrawn = False  # other random ops ran than in the first run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch_compat.OpOverload):  # what runs bodies of its own
            return func(*args, **kwargs)
        if self.in_double:
            if func is torch.ops.aten.view.dtype:
                raise NotRepeatable("the bits of a value are read as another dtype")
            args, kwargs = pytree.tree_map_only(torch.dtype, _wide_dtype, (args, kwargs))
        result = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags and not self.has_redrawn:
            result = self._drawn(func, args, kwargs, result)
        if torch_compat.schema(func).is_mutable:
            return result
        if self.in_double:
            result = pytree.tree_map_only(Tensor, _wide, result)
        if self.noise is not None:
            tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            given = {_memory(t) for t in tensors}
            result = pytree.tree_map_only(Tensor, lambda t: self._noisy(t, given), result)
        return result

    def _drawn(self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> Any:
        """The result of a random op with the numbers of the first run."""
        if any(a.name == "dropout_p" for a in torch_compat.schema(func).arguments):
            return result  # attention; what it drops, if anything, it draws within
        drawn = self.tape.next(func, result)
        self.has_redrawn = drawn is None
        if drawn is result or drawn is None:
            return result
        if func is torch.ops.aten.native_dropout.default:
            x, p = args[:2]
            return x * drawn[1] * (1.0 / (1.0 - p) if p < 1 else 0.0), drawn[1]
        if torch_compat.schema(func).is_mutable:
            return args[0].copy_(drawn)
        return drawn

    def _noisy(self, x: Tensor, given: set[int]) -> Tensor:
        """Put every number that is no integer a little off; a view of what was given stays."""
        if not x.is_floating_point() or _memory(x) in given:
            return x
        assert self.noise is not None
        generator = self.generators.get(x.device)
        if generator is None:
            generator = torch.Generator(x.device).manual_seed(self.seed)
            self.generators[x.device] = generator
        size = self.noise or torch.finfo(x.dtype).eps / 2
        kind = x.dtype if x.dtype == torch.float64 else torch.float32
        by = torch.rand(x.shape, generator=generator, device=x.device, dtype=kind) * 2 - 1
        return torch.where(x == x.round(), x, (x * (1 + size * by)).to(x.dtype))


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return _WIDE.get(dtype, dtype)


def _wide(value: Any) -> Any:
    """A tensor in fp64 if it holds floats; anything else as it is."""
    if isinstance(value, Tensor) and value.dtype in _WIDE:
        return value.to(_WIDE[value.dtype])
    return value


class _Interpreter(fx.Interpreter):
    """Runs a graph in a mode, the bodies that it calls once in the same way."""

    def __init__(self, module: fx.GraphModule, mode: _Mode):
        super().__init__(module)
        self.mode = mode

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return _wide(value) if self.mode.in_double else value

    def run_node(self, n: fx.Node) -> Any:
        if body_operands(n) or op_name(n) in _RECOMPUTED:
            return self._run_body(n)
        if self.mode.in_double and n.target in _RMS_NORMS:
            eps = operand(n, 3, "eps")
            x = tensor_meta(operand(n, 0, "input"))
            if eps is None and x is not None and x.dtype in _WIDE:
                args, kwargs = self.fetch_args_kwargs_from_env(n)
                return F.rms_norm(*args[:3], **{**kwargs, "eps": torch.finfo(torch.float32).eps})
        return super().run_node(n)

    def _run_body(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        at = next(i for i, a in enumerate(args) if isinstance(a, fx.GraphModule))
        settings, body, operands = args[:at], args[at], args[at + 1 :]
        tape, start = self.mode.tape, self.mode.tape.position

        def run(*values: Any) -> Any:
            tape.position = start
            return _Interpreter(body, self.mode).run(*values)

        name = op_name(n)
        # What a body writes in place it would write twice.
        if name in _RECOMPUTED and torch.is_grad_enabled() and not may_write(body):
            return checkpoint(run, *operands, use_reentrant=False, preserve_rng_state=False)
        if name == "wrap_with_autocast":
            with torch.autocast(*settings):
                return run(*operands)
        return run(*operands)


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor is memory with sizes and strides, and nothing else."""
    usual = type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided
    return usual and not x.is_conj() and not x.is_neg() and x.numel() > 0


def _copies(values: Sequence[Any], shared: Sequence[bool], *, in_double: bool) -> list[Any]:
    """Copy tensors, those that share memory into memory that they share; shared ones are not."""
    ranges: dict[tuple[int, torch.dtype], tuple[int, int]] = {}

    def key(x: Tensor) -> tuple[int, torch.dtype]:
        return _memory(x), x.dtype

    def span(x: Tensor) -> tuple[int, int]:
        first = int(x.storage_offset())
        return first, first + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1

    chosen = [isinstance(x, Tensor) and not s for x, s in zip(values, shared, strict=True)]
    for x, is_chosen in zip(values, chosen, strict=True):
        if is_chosen and _is_plain(x):
            (a, b), (c, d) = span(x), ranges.get(key(x), span(x))
            ranges[key(x)] = min(a, c), max(b, d)
    bases: dict[tuple[int, torch.dtype], Tensor] = {}
    result = []
    for x, is_chosen in zip(values, chosen, strict=True):
        if is_chosen and _is_plain(x):
            first, end = ranges[key(x)]
            if key(x) not in bases:
                base = x.detach().as_strided((end - first,), (1,), first)
                bases[key(x)] = _wide(base.clone()) if in_double else base.clone()
            at = x.storage_offset() - first
            result.append(bases[key(x)].as_strided(x.shape, x.stride(), at))
        elif isinstance(x, Tensor):
            x = x.detach() if not is_chosen else x.detach().clone()
            result.append(_wide(x) if in_double else x)
        else:
            result.append(x)
    return result


def may_write(module: fx.GraphModule) -> bool:
    """Whether a graph may write into memory that is there before it, a parameter's even."""
    for part, account in accounts_of(module):
        for node in part.graph.nodes:
            if account.writes_into(node):
                return True
            target = node.target
            if isinstance(target, torch_compat.OpOverloadPacket):
                overloads = [getattr(target, name) for name in target.overloads()]
            else:
                overloads = [target] if isinstance(target, torch_compat.OpOverload) else []
            bodies = isinstance(target, torch_compat.HigherOrderOperator)
            if any(torch_compat.schema(o).is_mutable for o in overloads):
                return True
            if bodies and op_name(node) not in TRANSPARENT_CALLS:
                return True
    return False


@dataclass
class Step:
    """What one run of a graph gave.

    written:        position of an input that it wrote in place -> what that became.
    returned:       positions of inputs that share memory with an output.
    gradients:      position of an input -> its gradient.
    differentiable: which outputs have a gradient.
    generators:     the states in which the run left them.
    has_redrawn:    whether its random ops were others than the first run's: in fp64 torch may take
                    other kernels, which draw other numbers, the same in every such run.
    """

    outputs: list[Any]
    written: dict[int, Tensor]
    returned: set[int] = field(default_factory=set)
    gradients: dict[int, Tensor | None] = field(default_factory=dict)
    differentiable: list[bool] = field(default_factory=list)
    generators: list[Tensor] = field(default_factory=list)
    has_redrawn: bool = False


class CallRuns:
    """The runs beside one call of a graph; made before the call, with the call's inputs."""

    def __init__(self, plain: fx.GraphModule, inputs: Sequence[Any]):
        self._inputs = list(inputs)
        keep = not may_write(plain)
        self._shared = [keep and isinstance(x, nn.Parameter) for x in inputs]
        self._values = _copies(inputs, self._shared, in_double=False)
        self._num_writes = _num_writes(inputs)
        self.tape = Tape()
        self._ambient = _ambient(inputs)
        devices = {x.device for x in inputs if isinstance(x, Tensor)}
        self._devices = [torch.device("cpu"), *(d for d in devices if d.type != "cpu")]
        self._before = self._states()
        self.wants_grad = [
            torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad for x in inputs
        ]

    def has_drawn_otherwise(self, step: Step) -> bool:
        """Whether generators are now in other states than a run left them in."""
        return not all(map(torch.equal, self._states(), step.generators))

    def parameters_are_as_before(self) -> bool:
        """Whether no parameter that was not copied has been written since."""
        now = zip(_num_writes(self._inputs), self._num_writes, self._shared, strict=True)
        return all(n == before for n, before, shared in now if shared)

    def run(
        self,
        graph: fx.GraphModule | Callable[..., Any],
        *,
        tangents: Sequence[Tensor | None] | None = None,
        in_double: bool = False,
        noise: float | None = None,
        seed: int = 0,
    ) -> Step:
        """Run a graph on the inputs of the call, and its backward if there are tangents.

        A function, what a compiler made of a graph, is called as it is.

        Args:     tangents: gradients of the outputs; None: forward alone, without gradients.
                  noise: None for none, 0.0 for half an ulp of each dtype, else how much of a value.
        Raises:   NotRepeatable, and whatever the graph's ops raise.
        """
        with self._apart():
            values = _copies(self._values, self._shared, in_double=in_double)
            for i, wanted in enumerate(self.wants_grad):
                if tangents is not None and wanted:
                    values[i] = values[i].detach().requires_grad_()
            before = _num_writes(values)
            self.tape.position = 0
            mode = _Mode(self.tape, in_double=in_double, noise=noise, seed=seed)
            context: AbstractContextManager[Any] = nullcontext()
            if isinstance(graph, fx.GraphModule):
                graph, context = _Interpreter(graph, mode).run, mode
            with context:
                with torch.set_grad_enabled(tangents is not None), self._autocast():
                    outputs = list(graph(*values))
                self.tape.is_recorded = True
                step = Step(outputs, {})
                if tangents is not None:
                    self._backward(step, values, tangents)
            memory = {_memory(x) for x in outputs if isinstance(x, Tensor)}
            for i, (x, num) in enumerate(zip(values, before, strict=True)):
                if isinstance(x, Tensor) and torch_compat.num_writes(x) != num:
                    step.written[i] = x.detach()
                if isinstance(x, Tensor) and _memory(x) in memory:
                    step.returned.add(i)
            step.generators = self._states()
            step.has_redrawn = mode.has_redrawn
        if mode.has_redrawn and not in_double:
            raise NotRepeatable("its random ops are not the same in every run")
        step.outputs = [x.detach() if isinstance(x, Tensor) else x for x in outputs]
        return step

    def _backward(self, step: Step, values: list[Any], tangents: Sequence[Tensor | None]) -> None:
        step.differentiable = [isinstance(x, Tensor) and x.requires_grad for x in step.outputs]
        ends, given = [], []
        for x, is_one, tangent in zip(step.outputs, step.differentiable, tangents, strict=True):
            if is_one:
                ends.append(x)
                given.append(torch.zeros_like(x) if tangent is None else tangent.to(x.dtype))
        wanted = [i for i, is_wanted in enumerate(self.wants_grad) if is_wanted]
        leaves = [values[i] for i in wanted]
        found: Sequence[Tensor | None] = [None] * len(leaves)
        if ends and leaves:
            found = torch.autograd.grad(ends, leaves, given, allow_unused=True)
        step.gradients = dict(zip(wanted, found, strict=True))

    def _states(self) -> list[Tensor]:
        return list(map(_generator_state, self._devices))

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Leave generators and what packs saved tensors (a checkpoint around us) alone."""
        now = self._states()
        for device, state in zip(self._devices, self._before, strict=True):
            _set_generator_state(device, state)
        try:
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
                yield
        finally:
            for device, state in zip(self._devices, now, strict=True):
                _set_generator_state(device, state)

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        with ExitStack() as stack:
            for make in self._ambient:
                stack.enter_context(make())
            yield


def _num_writes(values: Sequence[Any]) -> list[int]:
    return [torch_compat.num_writes(x) if isinstance(x, Tensor) else 0 for x in values]


def _ambient(inputs: Sequence[Any]) -> list[Callable[[], AbstractContextManager[Any]]]:
    """What makes the autocast that holds now, on the devices of the inputs."""
    kinds = {"cpu", *(x.device.type for x in inputs if isinstance(x, Tensor))}
    return [
        functools.partial(
            torch.autocast,
            kind,
            dtype=torch.get_autocast_dtype(kind),
            enabled=torch.is_autocast_enabled(kind),
            cache_enabled=False,
        )
        for kind in sorted(kinds)
        if torch.amp.is_autocast_available(kind)
    ]


def _generator_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def _set_generator_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
