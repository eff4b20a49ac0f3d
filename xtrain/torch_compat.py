"""Every use of a torch internal, each with its reason and a contract test per torch version.

Nothing here imports inductor: `import xtrain.ops` stays as cheap as `import torch`.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# --- Lowering an op by its decomposition, inside inductor alone ---------------------------------
#
# inductor's own decomposition table is applied by AOTAutograd, before the graph is cut into forward
# and backward: an op in that table is gone by then, and the partitioner may keep its intermediates
# (a dropout mask). A lowering runs after the cut, so forward and backward ops stay single nodes
# until nothing can be saved any more, and are fused with their neighbours all the same.
#
# A call that says opaque=True stays a call of the op: the same lowering hands it to inductor as an
# external kernel, which the wrapper calls between its own.

OPAQUE = "opaque"  # last argument of an op that has both forms

_pending_lowerings: dict[torch._ops.OpOverload, Callable[..., Any]] = {}


def lower_by_decomposition(op: torch._ops.OpOverload, decomposition: Callable[..., Any]) -> None:
    """Have inductor compile op as the plain torch function `decomposition` of the same arguments.

    The lowering is registered at the first compile: `flush_lowerings` is called by the op's fake
    implementation, which every compile runs and which finds inductor loaded by then.
    """
    _pending_lowerings[op] = decomposition
    flush_lowerings()


def position_of_opaque(op: torch._ops.OpOverload) -> int | None:
    """Return where op's schema has its last argument `opaque`, or None if it has none."""
    arguments = op._schema.arguments
    last = len(arguments) - 1
    return last if arguments and arguments[last].name == OPAQUE else None


def says_opaque(node: torch.fx.Node) -> bool:
    """Whether a call of an op that has both forms asks for its kernel."""
    position = position_of_opaque(node.target)  # type: ignore[arg-type]
    if position is None:
        return False
    positional = node.args[position] if len(node.args) > position else False
    return bool(node.kwargs.get(OPAQUE, positional))


def flush_lowerings() -> None:
    """Register the lowerings still waiting, once inductor has been imported by somebody."""
    if not _pending_lowerings or not hasattr(
        sys.modules.get("torch._inductor.lowering"), "register_lowering"
    ):
        return
    from torch._inductor.lowering import register_lowering

    while _pending_lowerings:
        op, decomposition = _pending_lowerings.popitem()
        register_lowering(op, type_promotion_kind=None)(_decomposed_lowering(decomposition))


def _decomposed_lowering(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    def lowering(*args: Any, **kwargs: Any) -> Any:
        from torch._inductor.virtualized import V

        node = V.graph.current_node
        if says_opaque(node):
            return _external_call(node, args, kwargs)
        flat_nodes, spec = pytree.tree_flatten((node.args, node.kwargs))
        flat_args = pytree.tree_leaves((list(args), kwargs))
        inputs = [i for i, leaf in enumerate(flat_nodes) if isinstance(leaf, torch.fx.Node)]

        def call(*values: Any) -> Any:
            leaves = list(flat_nodes)
            for i, value in zip(inputs, values, strict=True):
                leaves[i] = value
            call_args, call_kwargs = pytree.tree_unflatten(leaves, spec)
            return decomposition(*call_args, **call_kwargs)

        graph_module = _trace(call, [flat_nodes[i].meta["val"] for i in inputs])
        return _lower_graph(graph_module, [flat_args[i] for i in inputs])

    return lowering


def _external_call(node: torch.fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Lower node to a call of its op, its inputs laid out as they were traced.

    Inductor may otherwise pick other strides for an intermediate, which a kernel would copy.
    """
    from torch._inductor.lowering import constrain_to_fx_strides, fallback_handler

    args, kwargs = constrain_to_fx_strides(node, *args, **kwargs)
    return fallback_handler(node.target, add_to_fallback_set=False)(*args, **kwargs)


def _trace(function: Callable[..., Any], fake_inputs: list[Any]) -> torch.fx.GraphModule:
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    with V.fake_mode, torch.no_grad():
        return make_fx(function, decomposition_table=select_decomp_table())(*fake_inputs)


def _lower_graph(graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """Lower each node of a traced graph in place, as inductor does for the body of a subgraph."""
    from torch._inductor.virtualized import V

    env = V.graph.env
    remaining = iter(inputs)
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(remaining)
        elif node.op == "output":
            return torch.fx.node.map_arg(node.args[0], env.__getitem__)
        elif node.op == "call_function":
            env[node] = V.graph.run_node(node)
        else:
            raise RuntimeError(
                f"the decomposition of an xtrain op holds a {node.op} node ({node.target}): "
                "build constants from Python numbers (torch.full), not from tensors"
            )
    raise RuntimeError("the decomposition of an xtrain op has no output node")


def add_compile_cache_tag(tag: str) -> None:
    """Make torch's compile caches on disk depend on `tag`.

    A cached kernel is found by the graph, which names our ops but not the code they are lowered to:
    without the tag an upgraded xtrain would run kernels compiled from the old source.
    """
    import torch.compiler.config as compiler_config

    if tag not in compiler_config.cache_key_tag:
        compiler_config.cache_key_tag += tag


# --- Errors about arguments, at trace time too ---------------------------------------------------


def argument_error(message: str) -> ValueError:
    """Return the ValueError for a wrong argument, in a form that Dynamo hands on to the user.

    Dynamo wraps what a fake implementation raises into its own RuntimeError, except for its own
    `Unsupported`, which it raises as it is (fullgraph) or answers with a graph break, after which
    the eager op raises. An exception that is both keeps `except ValueError` right in every mode.
    """
    if torch._guards.TracingContext.try_get() is None:
        return ValueError(message)
    return _traced_value_error()(message)


@cache
def _traced_value_error() -> type[ValueError]:
    from torch._dynamo.exc import Unsupported

    return type("TracedValueError", (Unsupported, ValueError), {})


# --- Entering and leaving Dynamo ----------------------------------------------------------------


def in_backward() -> bool:
    """Return whether this thread runs inside an autograd backward (a recompute, a hook)."""
    return torch._C._current_graph_task_id() != -1


def backward_keeps_graph() -> bool:
    """Whether the running backward keeps what was saved for another one (retain_graph)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def is_observed() -> bool:
    """Whether a dispatch mode (tracing, fake tensors, a recorder) sees the calls made now."""
    return torch._C._len_torch_dispatch_stack() > 0


class StorageRef:
    """A weak reference to a tensor's memory: tells whether its address still means that tensor."""

    def __init__(self, tensor: torch.Tensor):
        from torch.multiprocessing.reductions import StorageWeakRef

        self._ref = StorageWeakRef(tensor.untyped_storage())

    def expired(self) -> bool:
        """Return whether the memory has been given back."""
        return self._ref.expired()


def fresh_entry(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a copy of function with a code object of its own.

    Dynamo keeps its compiled variants, and their recompile limit, per code object: with a shared
    one, the ninth compiled model of a process would silently fall back to eager.
    """
    code = function.__code__.replace(co_name=name, co_qualname=name)
    return types.FunctionType(code, function.__globals__, name)


def source_name(node: torch.fx.Node) -> str:
    """Return where a placeholder's value comes from ("L['self'].weight"), "" if unknown."""
    name = getattr(getattr(node, "_dynamo_source", None), "name", "")
    return str(name() if callable(name) else name)  # a method up to torch 2.11


def trace_config(**overrides: Any) -> Any:
    """Patch Dynamo's configuration for the frames that are traced inside the context."""
    return torch._dynamo.config.patch(**overrides)


def trace_overrides(*, shared_layers: bool) -> dict[str, Any]:
    """Return the Dynamo settings that our calls trace under.

    optimize_ddp: Dynamo would cut the graph at DDP's buckets before our backend sees it, through
    the middle of residual sites; `ddp_backend` cuts it afterwards instead.
    allow_unspec_int_on_nn_module: a layer index must not make each layer a graph of its own.
    """
    overrides: dict[str, Any] = {"optimize_ddp": False}
    if shared_layers:
        overrides["allow_unspec_int_on_nn_module"] = True
    return overrides


def ignore_logging_calls() -> None:
    """Let Dynamo trace through logging calls, which break graphs in Hugging Face losses."""
    import logging

    ignored = torch._dynamo.config.ignore_logging_functions
    for name in ("warning_once", "info_once"):
        method = getattr(logging.Logger, name, None)  # transformers adds these
        if method is not None:
            ignored.add(method)
    # Up to torch 2.11 Dynamo's telemetry stumbles over the functions, in a traceback per compile.
    if torch.__version__ < "2.12":
        logging.getLogger("torch._dynamo.metrics_context").addFilter(_is_no_telemetry_error)


def _is_no_telemetry_error(record: Any) -> bool:
    return "exception logging compilation metrics" not in str(record.msg)


def backend_cause(error: BaseException) -> BaseException | None:
    """Return the exception of our backend that Dynamo wrapped into `error`, or None."""
    return getattr(error, "inner_exception", None)


def mark_dynamic(tensor: torch.Tensor, dims: list[int]) -> None:
    """Ask Dynamo to trace these dimensions with symbols, without failing where it can't."""
    for dim in dims:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


def fake_like_inputs(example_inputs: Sequence[Any], value: torch.Tensor) -> torch.Tensor:
    """Return `value` in the form that a backend gets its other inputs in: real or fake."""
    for example in example_inputs:
        if isinstance(example, FakeTensor):
            with example.fake_mode:
                return torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=value.device
                )
    return value


def any_on_cuda(example_inputs: Sequence[Any]) -> bool:
    """Whether a tensor among the inputs of a graph is on a GPU."""
    return any(isinstance(x, torch.Tensor) and x.is_cuda for x in example_inputs)


def inner_backend(
    name: str, *, mode: str | None, options: dict[str, Any], dynamic: bool | None
) -> Callable[..., Callable[..., Any]]:
    """Return one of torch's own backends as (module, inputs) -> callable.

    Args:     name: "inductor" | "aot_eager" | "eager".

    For inductor, the bf16 roundings between ops that eager does are kept (design.md, E2), unless
    the options say otherwise.
    """
    if name == "inductor":
        wrapper = torch._TorchCompileInductorWrapper(mode, options, dynamic)
        wrapper.config.setdefault("emulate_precision_casts", True)
        _add_post_grad_pass(wrapper.config)
        return wrapper
    return torch._dynamo.lookup_backend(name)


def _add_post_grad_pass(config: dict[str, Any]) -> None:
    """Have inductor run split_gradient_sums on its graphs, unless a user's own pass is there."""
    from torch._inductor import config as inductor_config
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    from xtrain.passes import split_gradient_sums

    class SplitGradientSums(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            split_gradient_sums.split_gradient_sums(graph)

        def uuid(self) -> bytes:
            return get_hash_for_files((split_gradient_sums.__file__,))

    if inductor_config.post_grad_custom_pre_pass is None:
        config.setdefault("post_grad_custom_pre_pass", SplitGradientSums())


def cache_key_tag(tag: str) -> Any:
    """Make torch's compile caches on disk depend on `tag` for what is compiled in the context."""
    import torch.compiler.config as compiler_config

    return compiler_config.patch(  # type: ignore[attr-defined]
        cache_key_tag=compiler_config.cache_key_tag + tag
    )


def active_ddp_module() -> Any | None:
    """Return the DistributedDataParallel module whose forward is running, or None."""
    if not torch.distributed.is_available():
        return None
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()


def ddp_backend(ddp_module: Any, backend: Callable[..., Any]) -> Callable[..., Any]:
    """Return `backend` behind DDP's graph splitter, so that gradients are reduced bucket by bucket.

    This is what Dynamo does by itself under optimize_ddp, done here after our passes.
    """
    from torch._dynamo.backends.distributed import DDPOptimizer

    cap = ddp_module.bucket_bytes_cap
    # The first bucket is smaller by default, and may not be larger than the others.
    first = min(cap, torch.distributed._DEFAULT_FIRST_BUCKET_BYTES)
    return DDPOptimizer(
        bucket_bytes_cap=cap, backend_compile_fn=backend, first_bucket_cap=first
    ).compile_fn


# Looked up once, here: Dynamo cannot trace the lookup, and traces public functions that ask.
_HAS_TRITON = find_spec("triton") is not None


def has_triton() -> bool:
    """Return whether Triton can be imported; asked before a kernel is launched."""
    return _HAS_TRITON


def is_for_dynamo(error: BaseException) -> bool:
    """Return whether a backend's exception is for Dynamo to answer rather than a failure.

    It traces the frame anew, or breaks the graph where a size depends on data.
    """
    exc = torch._dynamo.exc
    return isinstance(error, (exc.RestartAnalysis, *exc.exceptions_allowed_to_be_fallback))


def guarded_float(value: torch.SymFloat) -> float:
    """Return the number that a symbolic float stands for, guarding that it stays that number."""
    float(value)  # the guard; what it returns went through decimal digits
    return float(value.node.hint)


def real_tensors() -> Any:
    """Suspend tracing and fake tensors, so that a constant of a graph can be computed."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


# --- Counting compiles --------------------------------------------------------------------------


def num_compiled_graphs() -> int:
    """Return how many graphs Dynamo has handed to backends in this process, recompiles included."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


# --- Watching ops (xtrain.drift) ----------------------------------------------------------------


class PlainDispatchMode(TorchDispatchMode):
    """A dispatch mode that costs no import of Dynamo, over a second, where nothing compiles.

    torch wraps a mode's __torch_dispatch__ so that Dynamo leaves it alone; the wrapper loads Dynamo
    at its first call. What compiles under a mode is run eagerly with or without it.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def interpreting_backend(result: Callable[[str, Any, Any], None]) -> Callable[..., Any]:
    """Return a backend that runs AOTAutograd's forward graph node by node, as aot_eager does.

    result: called as result(path, function, value) after each op; path is that of the innermost
            module of the node, relative to the compiled module, "" where none is known.
    """
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    class Interpreter(torch.fx.Interpreter):
        def run_node(self, node: torch.fx.Node) -> Any:
            value = super().run_node(node)
            if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                result(_module_path(node), node.target, value)
            return value

    def compile_forward(graph_module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        return make_boxed_func(lambda *args: Interpreter(graph_module).run(*args))

    return aot_autograd(fw_compiler=compile_forward)


def _module_path(node: torch.fx.Node) -> str:
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])  # "L['self'].blocks.0"; 'fn' where torch wraps forward
    return path.partition("']")[2].lstrip(".") if path.startswith("L['") else path


def is_graph_break(error: BaseException) -> bool:
    """Return whether Dynamo refused to trace a frame as one graph."""
    return isinstance(error, torch._dynamo.exc.Unsupported)


def last_sequence_number() -> int:
    """Return the number of the autograd node that was made last in this thread."""
    return torch._C._autograd._get_sequence_nr() - 1


def running_sequence_number() -> int | None:
    """Return the number of the autograd node whose backward runs in this thread, None if none."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


# --- graph breaks --------------------------------------------------------------------------------


def graph_breaks() -> list[tuple[str, str]]:
    """Return (place, reason) of each graph break since the last torch._dynamo.reset(), in order."""
    from torch._dynamo.utils import graph_break_reasons

    found = []
    for entry in graph_break_reasons:
        frame = entry.user_stack[-1] if entry.user_stack else None
        place = f"{frame.filename}:{frame.lineno}" if frame is not None else "an unknown place"
        found.append((place, entry.reason))
    return found
