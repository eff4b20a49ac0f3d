"""Calls of Triton kernels from inductor's code, at a tenth of what the same call costs eagerly.

A call of an op goes through torch's dispatcher, the Python of its implementation, and Triton's own
launcher, which looks at each argument to find the kernel compiled for them: 80 to 125 us of the
host for some of ours, in which a GPU that has little to do waits. Everything but the addresses
follows from shapes, strides, dtypes and constants. So the first call with each of them runs the
implementation and writes down what it does: which memory it takes and which compiled kernels it
launches, with which arguments. Later calls do just that, with the same kernels, so with the same
bits.

Where an implementation calls torch operators beside (attention by cuDNN, the copy of an input),
those are called again, in their order, without the Python around them. What cannot be written down
runs as it is, as a call of the op: what reads the values of tensors, writes to
an input, or passes a kernel more than addresses and constants (a descriptor holds an address).

Not user-defined kernels of inductor (torch.library.wrap_triton), which its launcher would start for
as little: up to torch 2.14 it hands on neither maxnreg, which the backward kernels of rows need,
nor enable_fp_fusion, on which the roundings of dropout_add_rms_norm depend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from xtrain import torch_compat

CALLS: dict[str, Replayed] = {}  # by the op's name; what inductor's code calls
MAX_PLANS = 1024  # of an op; only changing shapes make more, and then the oldest are long dead
ALIGNMENT = 16  # bytes: Triton compiles for addresses that are multiples of it, and for others

_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
_Origins = dict[int, tuple[int, int]]  # id of a tensor -> slot or value, offset in bytes
_Launch = tuple[Callable[..., None], list[Any], list[tuple[int, int, int]]]
LAUNCH = 5  # parts of a noted launch; a call of an operator has four
_EMPTY = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default)


class Replayed:
    """An op's CUDA implementation, called like the op.

    Without autograd, and on the current device, which must be that of the tensors: inductor's code
    sees to both.
    """

    def __init__(
        self,
        op: torch._ops.OpOverload,
        implementation: Callable[..., Any],
        state: Callable[[], Any] = lambda: None,
    ):
        self._op = op
        self._implementation = implementation
        self._state = state  # what beside its arguments the implementation goes by
        self._plans: dict[tuple[Any, ...], _Launches | _Calls | None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the op returns."""
        pointers: list[int] = []
        tensors: list[Tensor] = []
        device = args[0].get_device()
        key: list[Any] = [device, self._state(), *kwargs.items()]
        for arg in args:
            if isinstance(arg, Tensor):
                tensors.append(arg)
                pointers.append(_describe(arg, key))
            elif isinstance(arg, list):
                key.append(len(arg))
                for tensor in arg:
                    tensors.append(tensor)
                    pointers.append(_describe(tensor, key))
            else:
                key.append(arg)
        plan_key = tuple(key)
        try:
            plan = self._plans[plan_key]
        except KeyError:
            return self._record(plan_key, args, kwargs)
        if plan is None:
            return self._op(*args, **kwargs)
        return plan.run(tensors, pointers, device)

    def _record(self, key: tuple[Any, ...], args: Any, kwargs: Any) -> Any:
        # objects of their own: one tensor given twice is two arguments, which may differ next time
        args = pytree.tree_map_only(Tensor, torch.Tensor.detach, args)
        launching = import_module("xtrain.ops.triton.launching")
        recording = _Recording(pytree.tree_leaves(args))
        with torch.no_grad(), launching.noting(recording.note_launch), recording:
            result = self._implementation(*args, **kwargs)
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        self._plans[key] = recording.plan(result)
        return result


def _describe(tensor: Tensor, key: list[Any]) -> int:
    """Add to key all that decides how kernels are launched on tensor; return its address."""
    pointer = tensor.data_ptr()
    key += (tensor.dtype, tensor.shape, tensor.stride(), pointer % ALIGNMENT)
    return pointer


@dataclass(frozen=True)
class _Launches:
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
        tensors = [self.empty_strided(*layout) for layout in self.allocations]
        pointers += [tensor.data_ptr() for tensor in tensors]
        stream = self.stream(device)
        for start, constants, addresses in self.launches:
            arguments = constants.copy()
            for place, slot, offset in addresses:
                arguments[place] = pointers[slot] + offset
            start(*arguments, stream=stream)
        if self.is_tuple:
            return tuple([tensors[i] for i in self.results])
        return tensors[self.results[0]]


@dataclass(frozen=True)
class _Calls:
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
        values: list[Any] = [*tensors, *[None] * (self.num_values - len(tensors))]
        for is_launch, step, dead in self.steps:
            if is_launch:
                start, constants, addresses = step
                arguments = constants.copy()
                for place, value, _ in addresses:
                    arguments[place] = values[value].data_ptr()
                start(*arguments, stream=self.stream(device))
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


class _Recording(TorchDispatchMode):
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
        self._steps.append(launch)

    def plan(self, result: Any) -> _Launches | _Calls | None:
        """Return how to do the same again, or None where it cannot be said."""
        results = list(result) if isinstance(result, tuple) else [result]
        is_tuple = isinstance(result, tuple)
        return self._launches(results, is_tuple) or self._calls(results, is_tuple)

    def _launches(self, results: list[Any], is_tuple: bool) -> _Launches | None:
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
        return _Launches(empty, stream, layouts, launches, places, is_tuple)  # type: ignore

    def _calls(self, results: list[Any], is_tuple: bool) -> _Calls | None:
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
        return _Calls(stream, _let_go(steps, places), _count(values), places, is_tuple)

    def _as_call(
        self, values: _Origins, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any
    ) -> tuple[Any, ...] | None:
        """Return a step of _Calls, or None for what a replay may not call."""
        arguments = func._schema.arguments
        positional = self._read(values, dict(enumerate(args)), dict(enumerate(arguments)))
        by_name = self._read(values, kwargs, {argument.name: argument for argument in arguments})
        if positional is None or by_name is None or not _tensors(result):
            return None
        constants = [None if isinstance(arg, Tensor) else arg for arg in args]
        keywords = {name: arg for name, arg in kwargs.items() if not isinstance(arg, Tensor)}
        parts = [(None, result)] if isinstance(result, Tensor) else list(enumerate(result))
        made = []
        for place, part in parts:  # type: ignore[assignment]
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
    """Return what starts the kernel, its arguments, and (argument, slot, offset in bytes)."""
    if compiled is None:  # under Triton's interpreter
        return None
    named = {name: value for name, value in options.items() if name in kernel.arg_names}
    bound = kernel.signature.bind(*args, **named)
    bound.apply_defaults()
    constants, addresses = list(bound.arguments.values()), []
    for place, value in enumerate(constants):
        if isinstance(value, Tensor):
            if id(value) not in origins:
                return None
            addresses.append((place, *origins[id(value)]))
            constants[place] = None
        elif not _is_constant(value):
            return None
    return compiled[(*grid, 1, 1)[:3]], constants, addresses


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
