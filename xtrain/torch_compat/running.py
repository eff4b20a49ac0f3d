"""What runs now: backwards, torch.func, dispatch modes, library ops, memory, streams."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


def in_backward() -> bool:
    """Return whether this thread runs inside an autograd backward (a recompute, a hook)."""
    return torch._C._current_graph_task_id() != -1


def backward_keeps_graph() -> bool:
    """Whether the running backward keeps what was saved for another one (retain_graph)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def last_sequence_number() -> int:
    """Return the number of the autograd node that was made last in this thread."""
    return torch._C._autograd._get_sequence_nr() - 1


def running_sequence_number() -> int | None:
    """Return the number of the autograd node whose backward runs in this thread, None if none."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def is_observed() -> bool:
    """Whether a dispatch mode (tracing, fake tensors, a recorder) sees the calls made now."""
    return torch._C._len_torch_dispatch_stack() > 0


class PlainDispatchMode(TorchDispatchMode):
    """A dispatch mode that costs no import of Dynamo, over a second, where nothing compiles.

    torch wraps a mode's __torch_dispatch__ so that Dynamo leaves it alone; the wrapper loads Dynamo
    at its first call. What compiles under a mode is run eagerly with or without it.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class RecordingMode(TorchDispatchMode):
    """A dispatch mode under which Dynamo compiles as it does without: it sees what is left over.

    torch skips compilation under any other mode.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Say so to Dynamo."""
        return True


@contextmanager
def noting_launches(note: Callable[[str, list[Any]], None]) -> Iterator[None]:
    """Call note(name of a kernel, its arguments) for each Triton kernel that Python code launches.

    No dispatch mode sees one. Left out: what compiled code launches, and our own ops.
    """
    jit = sys.modules.get("triton.runtime.jit")
    if jit is None:
        yield
        return
    interface: Any = jit.KernelInterface
    launcher_of = interface.__getitem__

    def noted(kernel: Any, grid: Any) -> Callable[..., Any]:
        launch, function = launcher_of(kernel, grid), _function_of(kernel)

        def launch_and_note(*args: Any, **kwargs: Any) -> Any:
            result = launch(*args, **kwargs)
            if not function.__module__.startswith("xtrain."):
                note(function.__name__, [*args, *kwargs.values()])
            return result

        return launch_and_note

    interface.__getitem__ = noted
    try:
        yield
    finally:
        interface.__getitem__ = launcher_of


def python_function(tensor: torch.Tensor) -> str:
    """Return the name of the torch.autograd.Function whose result a tensor is, "" if of none."""
    node = tensor.grad_fn
    is_python = isinstance(node, torch.autograd.function.BackwardCFunction)
    return node.name().removesuffix("Backward") if is_python and node is not None else ""


def launched_kernel(node: torch.fx.Node) -> str:
    """Return the name of the Triton kernel that a node of Dynamo's graph launches, "" if none."""
    if not isinstance(node.target, HigherOrderOperator):
        return ""
    if not node.target.__name__.startswith("triton_kernel_wrapper"):
        return ""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    number: Any = node.kwargs["kernel_idx"]
    kernel = kernel_side_table.get_kernel(number)
    return str(_function_of(kernel).__name__)


def _function_of(kernel: Any) -> Any:
    """The Python function of a kernel, below what tunes it."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


def real_tensors() -> Any:
    """Suspend tracing and fake tensors, so that a constant of a graph can be computed."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def schema(op: OpOverload) -> torch.FunctionSchema:
    """Return what an op says of itself: its name, its arguments and which of them it writes."""
    return op._schema


# A row of the dispatcher's table: "CPU: registered at FILE:LINE [kernel]".
_REGISTERED = re.compile(r"^(\w+): (?:\w+ )*registered at (.+):\d+ \[(.+)\]", re.M)


def hidden_kernel(op: OpOverload, device_type: str) -> str:
    """Return why no Python runs when an op is called on a device, "" where some does.

    It may be its kernel, what is registered for autograd, or both.
    """
    key = torch._C._dispatch_key_for_device(device_type)
    rows = {
        row: (file, kind)
        for row, file, kind in _REGISTERED.findall(torch._C._dispatch_dump_table(op.name()))
    }
    registered = [rows.get(k, ("", "")) for k in (key, f"Autograd{key}")]
    is_composite = registered[0][1] == "math kernel"  # the dispatcher takes it apart, C++ too
    if is_composite or any(file.endswith((".py", ">")) for file, _ in registered):
        return ""
    return f"its {key} kernel is no Python code"


def run_kernel(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str
) -> Any:
    """Call the kernel of an op on a device, past autograd and past whoever watches the op."""
    key = getattr(torch._C.DispatchKey, torch._C._dispatch_key_for_device(device_type))
    return op.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)


@contextmanager
def without_memory(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Hand out tensors like these, fake or real, that have no memory; whoever asks for it raises.

    Inside, whatever is made has none either, and torch.compile compiles nothing. Sizes may be
    symbols: what the code asks of them is answered, and guards nothing.
    """
    from torch._functorch import config
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    environments = [t.fake_mode.shape_env for t in tensors if isinstance(t, FakeTensor)]
    environment = next((e for e in environments if e is not None), None)
    with config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
        mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    guarding = nullcontext() if environment is None else environment.suppress_guards()
    with guarding, mode, torch.no_grad(), torch.compiler.set_stance("force_eager"):
        yield [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
            for t in tensors
        ]


def num_writes(tensor: torch.Tensor) -> int:
    """Return how often a tensor's memory has been written in place, through any view of it."""
    return tensor._version


class StorageRef:
    """A weak reference to a tensor's memory: tells whether its address still means that tensor."""

    def __init__(self, tensor: torch.Tensor):
        from torch.multiprocessing.reductions import StorageWeakRef

        self._ref = StorageWeakRef(tensor.untyped_storage())

    def expired(self) -> bool:
        """Return whether the memory has been given back."""
        return self._ref.expired()


# Looked up once, here: Dynamo cannot trace the lookup, and traces public functions that ask.
_HAS_TRITON = find_spec("triton") is not None


def has_triton() -> bool:
    """Return whether Triton can be imported; asked before a kernel is launched."""
    return _HAS_TRITON


def empty_strided(device_type: str) -> Callable[..., torch.Tensor]:
    """Return empty(size, stride, dtype) of the current device: inductor's, cheaper than torch's."""
    return getattr(torch._C._dynamo.guards, f"_empty_strided_{device_type}")


def raw_stream(device_type: str) -> Callable[[int], int]:
    """Return what gives the handle of a device's current stream, as Triton's launchers take it."""
    return torch._C._cuda_getCurrentRawStream if device_type == "cuda" else lambda device: 0


def kernel_starter(
    compiled: Any, grid: tuple[int, ...]
) -> tuple[Callable[[tuple[Any, ...], int], None], list[int] | None, int]:
    """Return start(arguments, stream) of a kernel that Triton compiled, and its arguments.

    These are the numbers of those to give (None: all), and how many None follow them. By inductor's
    launcher, one call in C; where it cannot, by Triton's, which costs the host more. Addresses are
    ints. Hooks on launches, a profiler's, are as they were here.
    """
    try:
        return _static_starter(compiled, grid)
    except (ImportError, AttributeError, KeyError, NotImplementedError, RuntimeError):
        runner = compiled[grid]
        return (lambda arguments, stream: runner(*arguments, stream=stream)), None, 0


def _static_starter(
    compiled: Any, grid: tuple[int, ...]
) -> tuple[Callable[[tuple[Any, ...], int], None], list[int], int]:
    from torch._inductor.runtime.static_triton_launcher import StaticallyLaunchedCudaKernel

    metadata = compiled.metadata
    if metadata.launch_cooperative_grid or metadata.launch_pdl:
        raise NotImplementedError("inductor's launcher sets no such attribute")
    compiled._cubin_path = None  # read, though the kernel is loaded already
    static = StaticallyLaunchedCudaKernel(compiled)
    left_out = set(static.full_constexprs)
    numbers = {name: i for i, name in enumerate(compiled.src.fn.arg_names)}
    signature = compiled.src.signature
    kept = sorted(numbers[name] for name, kind in signature.items() if kind != "constexpr")
    kept = [number for number in kept if number not in left_out]
    if len(kept) != len(static.arg_tys):
        raise NotImplementedError("inductor's launcher counts other arguments than Triton")
    scratch = [static.has_global_scratch, static.has_profile_scratch].count(True)
    types = static.arg_tys + "O" * scratch
    fixed = (compiled.function, *grid, static.num_warps, static.shared, types)
    return partial(static.C_impl._launch_kernel, *fixed), kept, scratch


# --- function transforms over our ops: vmap's levels, and forward mode, which the ops refuse ------


def autograd_kernel(
    op: torch._ops.OpOverload, backward: Callable[..., Any], setup_context: Callable[..., None]
) -> Callable[..., Any]:
    """Return what `torch.library.register_autograd` makes of these, refusing forward mode.

    torch's own goes below autograd with a tangent, and loses it without a word.
    """
    from torch._library.autograd import Info, make_autograd_impl

    kernel = make_autograd_impl(op, Info(backward, setup_context))

    def without_tangents(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if _in_forward_mode() and any(map(_has_tangent, args)):
            raise NotImplementedError(
                f"{op.name()} has no forward-mode derivative (jvp, jacfwd, dual numbers): take the "
                "derivative in reverse (backward, torch.autograd.grad), or of the op's reference "
                "in plain PyTorch (xtrain.ops.OPS[name].reference)"
            )
        return kernel(keyset, *args, **kwargs)

    return without_tangents


def _in_forward_mode() -> bool:
    return torch.autograd.forward_ad._current_level >= 0


def _has_tangent(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    return torch.autograd.forward_ad.unpack_dual(value).tangent is not None


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor belongs to a level of a transform: a row of vmap's, a dual of jvp's."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def in_function_transform() -> bool:
    """Whether the code that runs is under a transform of torch.func: vmap, grad, jvp."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_mapped_in_part(*values: Any) -> bool:
    """Whether a vmap runs in which none of these values has a row of its own."""
    from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

    if not in_function_transform():
        return False
    vmap = torch._C._functorch.TransformType.Vmap
    levels = {i.level() for i in retrieve_all_functorch_interpreters() if i.key() == vmap}
    return not levels <= {level for value in values for level in _levels(value)}


def _levels(value: Any) -> set[int]:
    """The levels of the vmaps over whose rows a tensor goes."""
    functorch, levels = torch._C._functorch, set()
    while isinstance(value, torch.Tensor) and functorch.is_functorch_wrapped_tensor(value):
        if functorch.is_batchedtensor(value):
            levels.add(functorch.maybe_get_level(value))
        value = functorch.get_unwrapped(value)
    return levels
