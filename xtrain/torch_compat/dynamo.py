"""Dynamo: its entries, settings, symbols and counts; the failures that it hands on or answers."""

from __future__ import annotations

import inspect
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

_IN_BACKWARD = re.compile(r"Error detected in \w+\. Traceback of forward call")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*')
_IN_FORWARD = "Original traceback:"


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


def backend_cause(error: BaseException) -> BaseException | None:
    """Return the exception of our backend that Dynamo wrapped into `error`, or None."""
    return getattr(error, "inner_exception", None)


def leaves_code_to_eager(error: BaseException) -> bool:
    """Return whether Dynamo answers this exception of a backend by running code without it."""
    return isinstance(error, torch._dynamo.exc.exceptions_allowed_to_be_fallback)


def is_for_dynamo(error: BaseException) -> bool:
    """Return whether a backend's exception is for Dynamo to answer rather than a failure.

    It traces the frame anew, or breaks the graph where a size depends on data.
    """
    return isinstance(error, torch._dynamo.exc.RestartAnalysis) or leaves_code_to_eager(error)


def is_graph_break(error: BaseException) -> bool:
    """Return whether Dynamo refused to trace a frame as one graph."""
    return isinstance(error, torch._dynamo.exc.Unsupported)


def cause_of(error: BaseException) -> BaseException:
    """Return what a failed compilation failed with, without the exceptions wrapped around it."""
    inner = getattr(error, "inner_exception", None)
    return cause_of(inner) if isinstance(inner, BaseException) else error


def is_missing_compiler(error: BaseException) -> bool:
    """Return whether inductor found no C++ compiler on this machine."""
    return isinstance(error, torch._inductor.exc.InvalidCxxCompiler)


@contextmanager
def noting_backward_errors() -> Iterator[list[str]]:
    """Hand out a list that receives the forward's stack of each op whose backward fails to trace.

    The exception itself knows only the backward's code. AOTAutograd traces with anomaly detection
    on, which says in a warning where the forward called the op.
    """
    found: list[str] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=_IN_BACKWARD.pattern)
        show = warnings.showwarning

        def note(message: Any, *args: Any, **keywords: Any) -> None:
            if _IN_BACKWARD.match(str(message)):
                found.append(str(message))
            else:
                show(message, *args, **keywords)

        warnings.showwarning = note
        yield found


def frames(stack: str) -> list[tuple[str, str]]:
    """Return (file, line) of each frame in a printed stack, outermost first."""
    return [(found["file"], found["line"]) for found in _FRAME.finditer(stack)]


def forward_stack(error: BaseException, in_backward: list[str]) -> str:
    """Return the printed stack of the op that failed to trace, "" where nothing tells it.

    Args:     in_backward: what `noting_backward_errors` has noted.
    """
    if in_backward:
        return in_backward[-1]
    text = str(error.args[0]) if error.args else ""  # fx's interpreter puts it behind the message
    return text.partition(_IN_FORWARD)[2]


def graph_breaks() -> list[tuple[str, str]]:
    """Return (place, reason) of each graph break since the last torch._dynamo.reset(), in order."""
    from torch._dynamo.utils import graph_break_reasons

    found = []
    for entry in graph_break_reasons:
        frame = entry.user_stack[-1] if entry.user_stack else None
        place = f"{frame.filename}:{frame.lineno}" if frame is not None else "an unknown place"
        found.append((place, entry.reason))
    return found


def num_compiled_graphs() -> int:
    """Return how many graphs Dynamo has handed to backends in this process, recompiles included."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def fresh_entry(
    function: Callable[..., Any], name: str, model: torch.nn.Module | None = None
) -> Callable[..., Any]:
    """Return a copy of function with a code object of its own.

    Dynamo keeps its compiled variants, and their recompile limit, per code object: with a shared
    one, the ninth compiled model of a process would silently fall back to eager.

    Args:     function: one that reads no globals of its own.
              model: whose code it calls. Dynamo imports the module of what it traces by name,
              unless it is that of the function it began with.
    """
    code = function.__code__.replace(co_name=name, co_qualname=name)
    found = None if model is None else _not_importable(model)
    return types.FunctionType(code, function.__globals__ if found is None else found, name)


def _not_importable(model: torch.nn.Module) -> dict[str, Any] | None:
    """The globals of a model's code that stands in sys.modules under no name, or another's."""
    for kind in dict.fromkeys(map(type, model.modules())):
        forward = inspect.unwrap(kind.forward)  # type: ignore[attr-defined]
        found = getattr(forward, "__globals__", None)
        if found is not None and "__name__" in found:
            module = sys.modules.get(found["__name__"])
            if module is None or vars(module) is not found:
                return found
    return None


def source_name(node: torch.fx.Node) -> str:
    """Return where a placeholder's value comes from ("L['self'].weight"), "" if unknown."""
    name = getattr(getattr(node, "_dynamo_source", None), "name", "")
    return str(name() if callable(name) else name)  # a method up to torch 2.11


def copy_source(node: torch.fx.Node, copied: torch.fx.Node) -> None:
    """Let a copy of a placeholder come from where the placeholder does."""
    if hasattr(node, "_dynamo_source"):
        copied._dynamo_source = node._dynamo_source


def has_no_source(node: torch.fx.Node) -> None:
    """Say of a new placeholder that it comes from nowhere: AOTAutograd asks for it by name."""
    node._dynamo_source = None


def copy_marks(module: torch.nn.Module, copied: torch.nn.Module) -> None:
    """Let a copy of a graph module have what AOTAutograd looks up on Dynamo's own."""
    for name in ("_param_name_to_source", "_backend_id"):
        if hasattr(module, name):
            setattr(copied, name, getattr(module, name))


def is_erased(node: torch.fx.Node) -> bool:
    """Whether a node has been taken out of its graph."""
    return node._erased


@contextmanager
def trace_config(symbols: Sequence[str] = (), **overrides: Any) -> Iterator[None]:
    """Patch Dynamo's configuration for the frames that are traced inside the context.

    Sizes that are equal by chance (batch and length, length and width) stay two symbols: else one
    that must be a constant makes the other a constant too.

    Args:     symbols: patterns (re.match, without commas) of the sources whose ints are symbols
              from the first trace on; left alone, an int is one once Dynamo has seen it vary.
    """
    from torch.fx.experimental import _config

    compiler: Any = torch.compiler.config
    wanted = [(torch._dynamo.config, *item) for item in overrides.items()]
    wanted.append((_config, "use_duck_shape", False))
    if symbols:
        users = [compiler.dynamic_sources] if compiler.dynamic_sources else []
        wanted.append((compiler, "dynamic_sources", ",".join((*users, *symbols))))
    # Set one by one: `config.patch` makes a class at each call, and this is on every forward's way.
    before = [(config, name, getattr(config, name)) for config, name, _ in wanted]
    try:
        for config, name, value in wanted:
            setattr(config, name, value)
        yield
    finally:
        for config, name, value in before:
            setattr(config, name, value)


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
    # Up to torch 2.11 Dynamo's telemetry stumbles over the functions, in a traceback per compile
    # and another for what Triton's launches took between compiles.
    if torch.__version__ < "2.12":
        logging.getLogger("torch._dynamo.metrics_context").addFilter(_is_no_telemetry_error)


def _is_no_telemetry_error(record: Any) -> bool:
    text = str(record.msg)
    return not any(
        f"exception logging {kind} metrics" in text for kind in ("compilation", "runtime")
    )


def mark_dynamic(tensor: torch.Tensor, dims: list[int]) -> None:
    """Ask Dynamo to trace these dimensions with symbols, without failing where it can't."""
    for dim in dims:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


def guarded_float(value: torch.SymFloat) -> float:
    """Return the number that a symbolic float stands for, guarding that it stays that number."""
    float(value)  # the guard; what it returns went through decimal digits
    return float(value.node.hint)


def holds(comparison: bool | torch.SymBool) -> bool:
    """Return whether sizes compare so, guarding it; False where they come from data."""
    if isinstance(comparison, bool):
        return comparison
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(comparison)


# What Dynamo calls in a graph where code enters or leaves no_grad, enable_grad, set_grad_enabled;
# where it enters autocast (device, dtype, enabled, ...) and inference_mode (whether it does).
SET_GRAD_ENABLED = torch._C._set_grad_enabled
ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
ENTER_INFERENCE_MODE = torch.autograd.grad_mode._enter_inference_mode


def memory_of(tensor: torch.Tensor) -> int | None:
    """Return what names the memory of a tensor that is alive, fake or real; its views share it.

    None for a tensor that shows none: one within a functorch transform, a sparse one.
    """
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None
