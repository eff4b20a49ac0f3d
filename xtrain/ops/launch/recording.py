"""What an op's implementation does, written down: see replay.py, which does it again.

A recording notes the operators that the implementation calls and the kernels that it launches, and
makes a plan of them (code.py); or none, where what is done cannot be written down.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from xtrain import torch_compat
from xtrain.ops.launch import code
from xtrain.ops.launch.code import Call, Launch, Layout, Plan

_Origins = dict[int, tuple[int, int]]  # id of a tensor -> slot or value, offset in bytes
_Step = tuple[Launch | None, Call | None]  # one of the two
LAUNCH = 5  # parts of a noted launch; a call of an operator has four
_EMPTY = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default)


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
        """Take down a launch, as launching.py notes it."""
        self._steps.append(launch)

    def plan(self, result: Any) -> Plan | None:
        """Return how to do the same again, or None where it cannot be said."""
        results = list(result) if isinstance(result, tuple) else [result]
        is_tuple = isinstance(result, tuple)
        return self._launches(results, is_tuple) or self._calls(results, is_tuple)

    def _launches(self, results: list[Any], is_tuple: bool) -> Plan | None:
        origins = {id(t): (slot, 0) for slot, t in enumerate(self._inputs)}
        allocated: list[Tensor] = []
        launches = []
        for step in self._steps:
            if len(step) == LAUNCH:
                launch = _as_launch(origins, *step)
                if launch is None:
                    return None
                launches.append(launch)
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
        if not launches:
            return None
        device_type, num_inputs = self._inputs[0].device.type, len(self._inputs)
        return code.of_launches(device_type, num_inputs, layouts, launches, places, is_tuple)

    def _calls(self, results: list[Any], is_tuple: bool) -> Plan | None:
        values = {id(t): (number, 0) for number, t in enumerate(self._inputs)}
        steps: list[_Step] = []
        for step in self._steps:
            launch, call = None, None
            if len(step) == LAUNCH:
                launch = _as_launch(values, *step)
            else:
                call = self._as_call(values, *step)
            if launch is None and call is None:
                return None
            steps.append((launch, call))
        if any(id(tensor) not in values for tensor in results):
            return None
        places = [values[id(tensor)][0] for tensor in results]
        num_inputs = len(self._inputs)
        if min(places) < num_inputs:
            return None
        with_ends = _let_go(_without_unread(steps, places), num_inputs, places)
        device_type = self._inputs[0].device.type
        return code.of_calls(device_type, num_inputs, with_ends, places, is_tuple)

    def _as_call(
        self, values: _Origins, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any
    ) -> Call | None:
        """Return the call of an operator, or None for one that a replay may not make."""
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
) -> Launch | None:
    """Return what starts the kernel, its arguments, and where addresses go among them."""
    if compiled is None:  # under Triton's interpreter
        return None
    named = {name: value for name, value in options.items() if name in kernel.arg_names}
    bound = kernel.signature.bind(*args, **named)
    bound.apply_defaults()
    start, kept, trailing = torch_compat.kernel_starter(compiled, (*grid, 1, 1)[:3])
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
    return start, [*constants, *[None] * trailing], addresses


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


def _without_unread(steps: list[_Step], results: list[int]) -> list[_Step]:
    """Return the steps but for operators whose results nothing reads: views to ask about."""
    read, kept = set(results), []
    for launch, call in reversed(steps):
        if call is None or call[0]._schema.is_mutable or any(v in read for _, v in call[4]):
            kept.append((launch, call))
            read |= set(_read(launch, call))
    return kept[::-1]


def _let_go(
    steps: list[_Step], num_inputs: int, results: list[int]
) -> list[tuple[Launch | None, Call | None, list[int]]]:
    """Return the steps, each with the values that it is the last to read or make."""
    last: dict[int, int] = {}
    for number, (launch, call) in enumerate(steps):
        made = [] if call is None else [value for _, value in call[4]]
        last |= dict.fromkeys([*_read(launch, call), *made], number)
    dead: list[list[int]] = [[] for _ in steps]
    for value, number in last.items():
        if value >= num_inputs and value not in results:
            dead[number].append(value)
    return [(launch, call, dead[i]) for i, (launch, call) in enumerate(steps)]


def _read(launch: Launch | None, call: Call | None) -> list[int]:
    pairs = [] if launch is None else [(place, value) for place, value, _ in launch[2]]
    return [value for _, value in [*pairs, *([] if call is None else call[2])]]


def _count(values: _Origins) -> int:
    return 1 + max((number for number, _ in values.values()), default=-1)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _layout(tensor: Tensor) -> Layout:
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
