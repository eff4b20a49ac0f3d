"""What an op's implementation does, written down: see replay.py, which does it again.

A recording notes the operators that the implementation calls and the kernels that it launches. If
it launches alone, on its inputs and on memory of its own, that is a plan of Launches; with
operators between, one of Calls; and None where what it does cannot be written down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from xtrain import torch_compat

_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
_Origins = dict[int, tuple[int, int]]  # id of a tensor -> slot or value, offset in bytes
# start(arguments, stream), arguments without addresses, [(argument, slot, offset in bytes)]
_Launch = tuple[Callable[[list[Any], int], None], list[Any], list[tuple[int, int, int]]]
LAUNCH = 5  # parts of a noted launch; a call of an operator has four
_EMPTY = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default)


@dataclass(frozen=True)
class Launches:
    """A recorded call that does nothing but launch, on inputs and on memory of its own.

    A slot is an input, in their order, or behind them an allocation.
    """

    empty_strided: Callable[..., Tensor]
    stream: Callable[[int], int]
    allocations: list[_Layout]
    launches: list[_Launch]
    results: list[int]  # places among the allocations
    is_tuple: bool

    def run(self, _: list[Tensor], pointers: list[int], device: int) -> Any:
        """Do it on inputs at these addresses and return what the op returns."""
        tensors = [self.empty_strided(*layout) for layout in self.allocations]
        pointers += [tensor.data_ptr() for tensor in tensors]
        stream = self.stream(device)
        for start, constants, addresses in self.launches:
            arguments = constants.copy()
            for place, slot, offset in addresses:
                arguments[place] = pointers[slot] + offset
            start(arguments, stream)
        if self.is_tuple:
            return tuple([tensors[i] for i in self.results])
        return tensors[self.results[0]]


@dataclass(frozen=True)
class Calls:
    """A recorded call of operators and kernels, step by step; values count inputs, then results.

    A step is a launch, or (operator, arguments, [(argument, value)], keywords, what it makes: value
    numbers as it returns them). After each, the values that no later step reads are let go.
    """

    stream: Callable[[int], int]
    steps: list[tuple[bool, Any, list[int]]]
    num_values: int
    results: list[int]
    is_tuple: bool

    def run(self, tensors: list[Tensor], _: list[int], device: int) -> Any:
        """Do it on these inputs and return what the op returns."""
        values: list[Any] = [*tensors, *[None] * (self.num_values - len(tensors))]
        for is_launch, step, dead in self.steps:
            if is_launch:
                start, constants, addresses = step
                arguments = constants.copy()
                for place, value, _ in addresses:
                    arguments[place] = values[value].data_ptr()
                start(arguments, self.stream(device))
            else:
                operator, constants, places, keywords, made = step
                arguments, keywords = constants.copy(), keywords.copy()
                for place, value in places:
                    (keywords if isinstance(place, str) else arguments)[place] = values[value]
                result = operator(*arguments, **keywords)
                for place, value in made:
                    values[value] = result if place is None else result[place]
            for value in dead:
                values[value] = None
        if self.is_tuple:
            return tuple([values[i] for i in self.results])
        return values[self.results[0]]


class Recording(TorchDispatchMode):
    """Notes what an implementation calls and launches."""

    def __init__(self, leaves: list[Any]):
        super().__init__()
        self._inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._steps: list[tuple[Any, ...]] = []  # (operator, args, kwargs, result), or a launch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _tensors((args, kwargs, result)):  # others tell from constants: torch.promote_types
            self._steps.append((func, args, kwargs or {}, result))
        return result

    def note_launch(self, launch: tuple[Any, ...]) -> None:
        """Take down a launch, as ops/triton/launching.py notes it."""
        self._steps.append(launch)

    def plan(self, result: Any) -> Launches | Calls | None:
        """Return how to do the same again, or None where it cannot be said."""
        results = list(result) if isinstance(result, tuple) else [result]
        is_tuple = isinstance(result, tuple)
        return self._launches(results, is_tuple) or self._calls(results, is_tuple)

    def _launches(self, results: list[Any], is_tuple: bool) -> Launches | None:
        origins = {id(t): (slot, 0) for slot, t in enumerate(self._inputs)}
        allocated: list[Tensor] = []
        launches = []
        for step in self._steps:
            if len(step) == LAUNCH:
                launches.append(_as_launch(origins, *step))
            elif step[0] in _EMPTY:
                origins[id(step[3])] = (len(self._inputs) + len(allocated), 0)
                allocated.append(step[3])
            elif not _note_views(origins, *step):
                return None
        layouts, places = [_layout(t) for t in allocated], []
        for tensor in results:
            slot, offset = origins.get(id(tensor), (-1, 0))
            place = slot - len(self._inputs)
            if place < 0 or offset or place in places or not _fills(tensor, allocated[place]):
                return None
            places.append(place)
            layouts[place] = _layout(tensor)
        if not launches or None in launches:
            return None
        kind = self._inputs[0].device.type
        empty, stream = torch_compat.empty_strided(kind), torch_compat.raw_stream(kind)
        return Launches(empty, stream, layouts, launches, places, is_tuple)  # type: ignore

    def _calls(self, results: list[Any], is_tuple: bool) -> Calls | None:
        values = {id(t): (number, 0) for number, t in enumerate(self._inputs)}
        steps: list[tuple[bool, Any]] = []
        for step in self._steps:
            is_launch = len(step) == LAUNCH
            made = _as_launch(values, *step) if is_launch else self._as_call(values, *step)
            if made is None:
                return None
            steps.append((is_launch, made))
        if any(id(tensor) not in values for tensor in results):
            return None
        places = [values[id(tensor)][0] for tensor in results]
        if min(places) < len(self._inputs):
            return None
        stream = torch_compat.raw_stream(self._inputs[0].device.type)
        steps = _without_unread(steps, places)
        return Calls(stream, _let_go(steps, places), _count(values), places, is_tuple)

    def _as_call(
        self, values: _Origins, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any
    ) -> tuple[Any, ...] | None:
        """Return a step of Calls, or None for what a replay may not call."""
        arguments = func._schema.arguments
        positional = self._read(values, dict(enumerate(args)), dict(enumerate(arguments)))
        by_name = self._read(values, kwargs, {argument.name: argument for argument in arguments})
        if positional is None or by_name is None or not _tensors(result):
            return None
        constants = [None if isinstance(arg, Tensor) else arg for arg in args]
        keywords = {name: arg for name, arg in kwargs.items() if not isinstance(arg, Tensor)}
        parts = [(None, result)] if isinstance(result, Tensor) else list(enumerate(result))
        made = []
        for place, part in parts:
            if isinstance(part, Tensor):
                made.append((place, values.setdefault(id(part), (_count(values), 0))[0]))
            elif _tensors(part):
                return None
        return func, constants, positional + by_name, keywords, made

    def _read(
        self, values: _Origins, given: dict[Any, Any], arguments: dict[Any, Any]
    ) -> list[tuple[Any, int]] | None:
        """Return (place or name, value) of each tensor given, or None where a replay may not."""
        read = []
        for place, arg in given.items():
            if isinstance(arg, Tensor):
                if id(arg) not in values:
                    return None
                number = values[id(arg)][0]
                info = arguments[place].alias_info
                if info is not None and info.is_write and number < len(self._inputs):
                    return None
                read.append((place, number))
            elif _tensors(arg):
                return None
        return read


def _as_launch(
    origins: _Origins,
    kernel: Any,
    compiled: Any,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> _Launch | None:
    """Return what starts the kernel, its arguments, and where addresses go among them."""
    if compiled is None:  # under Triton's interpreter
        return None
    named = {name: value for name, value in options.items() if name in kernel.arg_names}
    bound = kernel.signature.bind(*args, **named)
    bound.apply_defaults()
    start, kept = torch_compat.kernel_starter(compiled, (*grid, 1, 1)[:3])
    constants: list[Any] = []
    addresses = []
    for number, value in enumerate(bound.arguments.values()):
        if isinstance(value, Tensor):
            if id(value) not in origins:
                return None
            addresses.append((len(constants), *origins[id(value)]))
            value = None
        elif not _is_constant(value):
            return None
        if kept is None or number in kept:
            constants.append(value)
    return start, constants, addresses


def _is_constant(value: Any) -> bool:
    """Whether an argument of a kernel says the same at every call; a descriptor does not."""
    return (
        value is None
        or type(value) in (bool, int, float, str)
        or type(value).__module__.startswith("triton.language")
    )


def _note_views(
    origins: _Origins, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any
) -> bool:
    """Note where the views lie that an operator gave; False where it did anything else."""
    if not args or id(args[0]) not in origins or func._schema.is_mutable:
        return False
    slot, offset = origins[id(args[0])]
    for view in pytree.tree_leaves(result):
        if not isinstance(view, Tensor) or _storage(view) != _storage(args[0]):
            return False
        origins[id(view)] = (slot, offset + view.data_ptr() - args[0].data_ptr())
    return True


def _without_unread(steps: list[tuple[bool, Any]], results: list[int]) -> list[tuple[bool, Any]]:
    """Return the steps but for operators whose results nothing reads: views to ask about."""
    read, kept = set(results), []
    for is_launch, step in reversed(steps):
        if is_launch or step[0]._schema.is_mutable or any(v in read for _, v in step[4]):
            kept.append((is_launch, step))
            read |= {pair[1] for pair in step[2]}
    return kept[::-1]


def _let_go(steps: list[tuple[bool, Any]], results: list[int]) -> list[tuple[bool, Any, list[int]]]:
    """Return the steps, each with the values that it is the last to read or make."""
    last: dict[int, int] = {}
    for number, (is_launch, step) in enumerate(steps):
        read = [pair[1] for pair in step[2]]
        made = [] if is_launch else [value for _, value in step[4]]
        last |= dict.fromkeys([*read, *made], number)
    dead: list[list[int]] = [[] for _ in steps]
    for value, number in last.items():
        if value not in results:
            dead[number].append(value)
    return [(is_launch, step, dead[i]) for i, (is_launch, step) in enumerate(steps)]


def _count(values: _Origins) -> int:
    return 1 + max((number for number, _ in values.values()), default=-1)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _layout(tensor: Tensor) -> _Layout:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _fills(view: Tensor, allocated: Tensor) -> bool:
    """Whether view is all of an allocation, its dims in whatever order."""
    dims = [
        (stride, size) for stride, size in zip(view.stride(), view.shape, strict=True) if size != 1
    ]
    dense = 1
    for stride, size in sorted(dims):
        if stride != dense:
            return view.numel() == 0 == allocated.numel()
        dense *= size
    return dense == allocated.numel() and view.dtype == allocated.dtype
