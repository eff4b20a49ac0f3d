"""Runs a model's forward and hands every op's result to a collector.

eager        a dispatch mode sees each aten op; hooks know which module is running
aot_eager    the graph of torch.compile, run op by op; its nodes name their modules
inductor     nothing inside can be seen: block outputs become outputs of the graph. That changes the
             graph, so the model runs a second time as it is; its logits count, and whether the
             observed run had the same bits is the "observer effect"
unobserved   logits alone, for a model that is compiled already
"""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from xtrain import torch_compat
from xtrain.blocks import Blocks
from xtrain.drift.recording.record_format import FIRST_WEIGHT, INPUT, UNKNOWN
from xtrain.drift.recording.recorded_model import derived_buffers, saved_weights
from xtrain.drift.recording.writing import Collector
from xtrain.drift.settings import DriftError

# Results that hold whatever the memory held before, or a copy of bits that were recorded already.
SKIPPED = {
    *("aten.empty", "aten.empty_like", "aten.empty_strided", "aten.empty_permuted"),
    *("aten.new_empty", "aten.new_empty_strided", "aten.lift_fresh", "aten.lift_fresh_copy"),
    *("aten._unsafe_view", "aten._reshape_alias", "aten.clone"),
}


class Runner:
    """Calls a model in one of MODES; `observer_effect` grows with what the re-runs find."""

    def __init__(self, model: nn.Module, mode: str):
        self.model = model
        self.mode = mode
        self.blocks = find_blocks(model)
        self.derived = derived_buffers(model)
        self.observer_effect: dict[str, Any] | None = None
        self._collector: Collector | None = None
        if mode in ("aot_eager", "inductor"):
            self.observer_effect = {"differs": False, "max_abs": 0.0}
            backend: Any = mode
            if mode == "aot_eager":
                backend = torch_compat.interpreting_backend(self._graph_result, with_operands=True)
            self._with_blocks = _WithBlocks(model)
            self._plain = _compile(_Logits(model), mode)
            self._observed = _compile(self._with_blocks, backend)

    def __call__(
        self, inputs: Mapping[str, Any], collector: Collector | None, *, ops: bool = True
    ) -> Tensor:
        """Return logits [B, T, V]; with collector None the run is not recorded, ops or blocks."""
        origins = Origins(self.model, inputs.values())
        if collector is not None and ops and self.mode in ("eager", "aot_eager"):
            for name, buffer in self.derived:
                path, _, own_name = name.rpartition(".")
                origins.note(buffer, collector.add_op(path, f"buffer.{own_name}", buffer))
        with torch.no_grad():
            if self.mode in ("aot_eager", "inductor"):
                return self._compiled(inputs, collector, ops, origins)
            if collector is None or self.mode == "unobserved":
                return logits_of(call(self.model, inputs))
            with observed(self.model, self.blocks, collector, origins, ops=ops):
                return logits_of(call(self.model, inputs))

    def _compiled(
        self, inputs: Mapping[str, Any], collector: Collector | None, ops: bool, origins: Origins
    ) -> Tensor:
        self._collector, self._origins = (collector if ops else None), origins
        watched = self._with_blocks
        try:
            with block_outputs(self.blocks, watched.take):
                logits, blocks = self._observed(inputs)
            plain = self._plain(inputs)
        except Exception as error:
            if not torch_compat.is_graph_break(error):
                raise
            reason = str(error).strip().splitlines()[0]
            raise DriftError(
                f"the model does not compile as one graph ({reason}); record it with --mode eager"
            ) from error
        finally:
            self._collector = None
            watched.found.clear()
        if collector is not None:
            for path, block in blocks:
                collector.add_block(path, block)
            self.note_effect(logits, plain)
        return plain

    def _graph_result(
        self, path: str, function: Any, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        if self._collector is not None:
            path = path.removeprefix("model").lstrip(".")
            record_result(self._collector, self._origins, path, function, args, kwargs, result)

    def note_effect(self, observed_logits: Tensor, plain: Tensor) -> None:
        """Compare the logits of a run that was watched with those of one that was not."""
        if self.observer_effect is None:
            self.observer_effect = {"differs": False, "max_abs": 0.0}
        if not torch.equal(observed_logits, plain):
            x, y = observed_logits.double(), plain.double()
            delta = (x - y).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
            delta[(x == y) | (x.isnan() & y.isnan())] = 0.0
            worst = max(self.observer_effect["max_abs"], float(delta.max()))
            if worst > 0:
                self.observer_effect = {"differs": True, "max_abs": worst}


def _compile(module: nn.Module, backend: Any) -> Callable[..., Any]:
    return torch.compile(module, backend=backend, dynamic=False, fullgraph=True)


class _Logits(nn.Module):
    """The model as it is, reduced to its logits."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, inputs: Mapping[str, Any]) -> Tensor:
        return logits_of(call(self.model, inputs))


class _WithBlocks(_Logits):
    """The model with the outputs of its blocks, which hooks hand to `take`, as graph outputs."""

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self.found: list[tuple[str, Tensor]] = []  # a block may run twice, or not at all

    def take(self, path: str, output: Tensor) -> None:
        """Remember the output of a block."""
        self.found.append((path, output))

    def forward(self, inputs: Mapping[str, Any]) -> Any:
        logits = logits_of(call(self.model, inputs))
        return logits, list(self.found)


@contextmanager
def block_outputs(
    blocks: Mapping[str, nn.Module], take: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Hand the output of each block that runs inside to `take`.

    The hooks are there while a compiled model runs, and so while it is traced, and gone for
    everybody else.
    """

    def hook(module: nn.Module, args: Any, output: Any, path: str) -> None:
        tensor = first_tensor(output)
        if tensor is not None:
            take(path, tensor)

    handles = [m.register_forward_hook(partial(hook, path=path)) for path, m in blocks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Observer(torch_compat.PlainDispatchMode):
    """Hands the result of every op that runs inside to a sink, with the module that calls it."""

    def __init__(self, sink: OpSink, origins: Origins):
        super().__init__()
        self.sink, self.origins = sink, origins
        self.path: list[str] = []  # of the modules that run, the innermost last
        self.paused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.paused:
            place = self.place()
            record_result(self.sink, self.origins, place, func, args, kwargs, result)
        return result

    def place(self) -> str:
        """Return the module that is running."""
        return self.path[-1] if self.path else ""

    @contextmanager
    def hooks(self, model: nn.Module) -> Iterator[None]:
        """Keep track of the module that runs."""

        def enter(module: nn.Module, args: Any, path: str) -> None:
            self.path.append(path)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if self.path:
                self.path.pop()

        handles = []
        for path, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(partial(enter, path=path)))
            handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def observed(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    collector: Collector,
    origins: Origins,
    *,
    ops: bool = True,
) -> Iterator[None]:
    """Record the ops of what runs inside, unless ops is False, and the outputs of blocks."""
    observer = Observer(collector, origins)

    def take(path: str, output: Tensor) -> None:
        observer.paused = True  # what is computed there is none of the model's
        collector.add_block(path, output)
        observer.paused = False

    watching = observer if ops else nullcontext()
    with observer.hooks(model), block_outputs(blocks, take), watching:
        yield


class OpSink(Protocol):
    """What takes the results of ops."""

    def add_op(
        self, path: str, op: str, tensor: Tensor, operands: Sequence[int] = (), arguments: str = ""
    ) -> int:
        """Take one, which may change afterwards, and return its number among those taken."""


class Origins:
    """Which op, weight or input of a forward a tensor comes from; a view comes from what it shows.

    Known by the memory that holds it: what an op has written last is that op's result.
    """

    def __init__(self, model: nn.Module, inputs: Iterable[Any]):
        self.found = {_memory(value): INPUT for value in inputs if isinstance(value, Tensor)}
        weights = [tensor for _, tensor in saved_weights(model)]
        self.pieces = sorted(
            (start, start + tensor.nbytes, FIRST_WEIGHT - number)
            for number, tensor in enumerate(weights)
            if (start := _address(tensor))
        )
        self.starts = [start for start, _, _ in self.pieces]
        self.weights = {_memory(tensor) for tensor in weights}

    def of(self, tensor: Tensor) -> int:
        """Return the number of an op, or INPUT, UNKNOWN, or FIRST_WEIGHT less a weight's number."""
        found = self.found.get(_memory(tensor))
        if found is not None:
            return found
        address = _address(tensor)
        at = bisect_right(self.starts, address) - 1
        inside = at >= 0 and address < self.pieces[at][1]
        return self.pieces[at][2] if inside else UNKNOWN

    def note(self, tensor: Tensor, origin: int) -> None:
        """Remember where a tensor comes from."""
        memory = _memory(tensor)
        if memory and memory not in self.weights:  # a file's weights may share one piece of memory
            self.found[memory] = origin


def _memory(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0  # a tensor without memory of its own


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr() if _memory(tensor) else 0


def record_result(
    collector: OpSink,
    origins: Origins,
    path: str,
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: Any,
) -> None:
    """Hand the tensors that an op computed to the collector; views compute nothing."""
    if is_view(func):
        return
    name = op_name(func)
    results = result if isinstance(result, tuple | list) else (result,)
    operands, arguments = _computed_from(func, args, kwargs)
    sources = [origins.of(tensor) for tensor in operands]
    if name in SKIPPED:
        for tensor in results:
            if isinstance(tensor, Tensor):
                origins.note(tensor, sources[0] if sources else UNKNOWN)
        return
    seen = 1 if name.startswith("aten._scaled_dot_product") else len(results)
    for number, tensor in enumerate(results):
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            continue
        origin = UNKNOWN  # the others are for backward, on CUDA random state among them
        if number < seen and not tensor.is_quantized and not tensor.is_meta:
            full = f"{name}.{number}" if number else name
            origin = collector.add_op(path, full, tensor, sources, arguments)
        origins.note(tensor, origin)


def _computed_from(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Tensor], str]:
    """Return an op's tensors, and what else its numbers depend on: eps, factors, an approximation.

    Sizes and dimensions are seen in the shapes, and grow with the sequence.
    """
    tensors: list[Tensor] = []
    words = []
    for (name, kept), value in zip(_parameters_of(func), args, strict=False):
        _take(value, tensors)
        if kept and isinstance(value, bool | int | float | str):
            words.append(f"{name}={value}")
    for name, value in kwargs.items():
        _take(value, tensors)
        if isinstance(value, float | str) or isinstance(value, int) and name != "dim":
            words.append(f"{name}={value}")
    return tensors, ", ".join(words) if tensors else ""


def _take(value: Any, tensors: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        tensors.append(value)
    elif isinstance(value, tuple | list):
        tensors.extend(item for item in value if isinstance(item, Tensor))


@lru_cache(maxsize=4096)
def _parameters_of(func: Any) -> list[tuple[str, bool]]:
    """Return of each positional argument its name, and whether its number is one of the formula."""
    schema = getattr(func, "_schema", None)
    kinds = ("Tensor", "number", "float", "bool", "str")
    return [
        (value.name, str(value.type).removeprefix("Optional[").rstrip("]") in kinds)
        for value in (schema.arguments if schema is not None else ())
    ]


@lru_cache(maxsize=4096)
def op_name(func: Any) -> str:
    """Return "aten.add" for every overload of it, in place or not."""
    schema = getattr(func, "_schema", None)
    name = str(schema.name).replace("::", ".") if schema is not None else str(func)
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


@lru_cache(maxsize=4096)
def is_view(func: Any) -> bool:
    """Return whether an op's results share the memory of its inputs without writing to it."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return False
    aliases = [value.alias_info for value in schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks, path -> module; where there are none the model's own children."""
    return Blocks(model).modules or dict(model.named_children())


def call(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Call a model with its tokens under the name that it gives them, or as the first argument."""
    names = list(inspect.signature(model.forward).parameters)
    inputs = dict(inputs)
    if "input_ids" in inputs and "input_ids" not in names:
        return model(inputs.pop("input_ids"), **inputs)
    if "use_cache" in names:  # a cache that nobody reads would only cost memory
        inputs.setdefault("use_cache", False)
    return model(**inputs)


def logits_of(output: Any) -> Tensor:
    """Return the logits in what a model returns (an output object, a tuple, a dict, a tensor).

    As [B, T, V], whether the model gives that, [B, V] or [V].
    """
    logits = output if isinstance(output, Tensor) else None
    if isinstance(output, Mapping):
        logits = output.get("logits")
    logits = getattr(output, "logits", None) if logits is None else logits
    if logits is None and isinstance(output, tuple | list):
        logits = next((item for item in output if isinstance(item, Tensor)), None)
    if not isinstance(logits, Tensor) or not 1 <= logits.dim() <= 3 or not logits.numel():
        shape = f" {list(logits.shape)}" if isinstance(logits, Tensor) else ""
        raise DriftError(
            f"the model returns no logits [B, T, V] but {type(output).__name__}{shape}"
        )
    if logits.dim() == 3:
        return logits
    return logits.unsqueeze(-2) if logits.dim() == 2 else logits[None, None]


def first_tensor(output: Any) -> Tensor | None:
    """Return the tensor that a block returns, the first of several."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple | list):
        return next((item for item in output if isinstance(item, Tensor)), None)
    return getattr(output, "last_hidden_state", None)
