"""Calls of Triton kernels from inductor's code, at a tenth of what the same call costs eagerly.

A call of an op goes through torch's dispatcher, the Python of its implementation, and Triton's own
launcher, which looks at each argument to find the kernel compiled for them: 80 to 125 us of the
host for some of ours, in which a GPU that has little to do waits. Everything but the addresses
follows from shapes, strides, dtypes and constants. So the first call with each of them runs the
implementation and writes down what it does: which memory it takes and which compiled kernels it
launches, with which arguments. Later calls do just that, with the same kernels, so with the same
bits.

What cannot be written down is not replayed: an implementation that calls any torch operator but
empty and views (a copy of an input, the decomposition where `supports` refuses) runs as it is, as a
call of the op.

Not user-defined kernels of inductor (torch.library.wrap_triton), which its launcher would start for
as little: up to torch 2.14 it hands on neither maxnreg, which the backward kernels of rows need,
nor enable_fp_fusion, on which the roundings of dropout_add_rms_norm depend.
"""

from __future__ import annotations

from collections.abc import Callable
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
_EMPTY = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default)


class Replayed:
    """An op's CUDA implementation, called like the op.

    Without autograd, and on the current device, which must be that of the tensors: inductor's code
    sees to both.
    """

    def __init__(self, op: torch._ops.OpOverload, implementation: Callable[..., Any]):
        self._op = op
        self._implementation = implementation
        self._plans: dict[tuple[Any, ...], _Plan | None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the op returns."""
        pointers: list[int] = []
        key: list[Any] = list(kwargs.values())
        for arg in args:
            if isinstance(arg, Tensor):
                _describe(arg, key, pointers)
            elif isinstance(arg, list):
                key.append(len(arg))
                for tensor in arg:
                    _describe(tensor, key, pointers)
            else:
                key.append(arg)
        device = args[0].get_device()
        plan_key = (device, *key)
        try:
            plan = self._plans[plan_key]
        except KeyError:
            return self._record(plan_key, args, kwargs)
        if plan is None:
            return self._op(*args, **kwargs)
        return plan.run(pointers, device)

    def _record(self, key: tuple[Any, ...], args: Any, kwargs: Any) -> Any:
        # objects of their own: one tensor given twice is two arguments, which may differ next time
        args = pytree.tree_map_only(Tensor, torch.Tensor.detach, args)
        launching = import_module("xtrain.ops.triton.launching")
        recording = _Recording(pytree.tree_leaves(args))
        with torch.no_grad(), launching.noting(recording.launches.append), recording:
            result = self._implementation(*args, **kwargs)
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        self._plans[key] = recording.plan(result)
        return result


def _describe(tensor: Tensor, key: list[Any], pointers: list[int]) -> None:
    """Add to key all that decides how kernels are launched on tensor, and its address."""
    pointer = tensor.data_ptr()
    pointers.append(pointer)
    key += (tensor.dtype, tensor.shape, tensor.stride(), pointer % ALIGNMENT)


class _Plan:
    """What one recorded call does, for tensors at any addresses of the recorded alignment.

    A slot is an input, in their order, or behind them an allocation.
    """

    def __init__(
        self,
        device_type: str,
        allocations: list[_Layout],
        launches: list[tuple[Callable[..., None], list[Any], list[tuple[int, int, int]]]],
        results: list[int],
        is_tuple: bool,
    ):
        self._empty_strided = torch_compat.empty_strided(device_type)
        self._stream = torch_compat.raw_stream(device_type)
        self._allocations = allocations
        self._launches = launches  # what to call; its arguments; (argument, slot, offset in bytes)
        self._results = results  # places among the allocations
        self._is_tuple = is_tuple

    def run(self, pointers: list[int], device: int) -> Any:
        tensors = [self._empty_strided(*layout) for layout in self._allocations]
        pointers += [tensor.data_ptr() for tensor in tensors]
        stream = self._stream(device)
        for start, constants, addresses in self._launches:
            arguments = constants.copy()
            for place, slot, offset in addresses:
                arguments[place] = pointers[slot] + offset
            start(*arguments, stream=stream)
        if self._is_tuple:
            return tuple([tensors[i] for i in self._results])
        return tensors[self._results[0]]


class _Recording(TorchDispatchMode):
    """Notes the memory that an implementation takes, its views, and whether it does more."""

    def __init__(self, leaves: list[Any]):
        super().__init__()
        self.launches: list[Any] = []
        self._inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._allocated: list[Tensor] = []
        self._others: list[Any] = []  # operators that a replay would have to call
        self._views: list[Tensor] = []  # kept: an id stays theirs
        self._origins = {id(t): (slot, 0) for slot, t in enumerate(self._inputs)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _EMPTY:
            self._origins[id(result)] = (len(self._inputs) + len(self._allocated), 0)
            self._allocated.append(result)
        elif not _has_no_tensors((args, kwargs, result)) and not self._is_view(func, args, result):
            self._others.append(func)
        return result

    def _is_view(self, func: Any, args: tuple[Any, ...], result: Any) -> bool:
        origin = self._origins.get(id(args[0])) if args else None
        if origin is None or func._schema.is_mutable:
            return False
        slot, offset = origin
        for view in pytree.tree_leaves(result):
            if not isinstance(view, Tensor) or _storage(view) != _storage(args[0]):
                return False
            self._views.append(view)
            self._origins[id(view)] = (slot, offset + view.data_ptr() - args[0].data_ptr())
        return True

    def plan(self, result: Any) -> _Plan | None:
        """Return how to do the same again, or None where it cannot be said."""
        results = list(result) if isinstance(result, tuple) else [result]
        layouts = [_layout(t) for t in self._allocated]
        places: list[int] = []
        for tensor in results:
            slot, offset = self._origins.get(id(tensor), (-1, 0))
            place = slot - len(self._inputs)
            if place < 0 or offset or place in places or not _fills(tensor, self._allocated[place]):
                return None
            places.append(place)
            layouts[place] = _layout(tensor)
        launches = [self._launch(*launch) for launch in self.launches]
        if self._others or not launches or None in launches:
            return None
        device_type = self._inputs[0].device.type
        is_tuple = isinstance(result, tuple)
        return _Plan(device_type, layouts, launches, places, is_tuple)  # type: ignore

    def _launch(
        self,
        kernel: Any,
        compiled: Any,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        options: dict[str, Any],
    ) -> tuple[Callable[..., None], list[Any], list[tuple[int, int, int]]] | None:
        if compiled is None:  # under Triton's interpreter
            return None
        named = {name: value for name, value in options.items() if name in kernel.arg_names}
        bound = kernel.signature.bind(*args, **named)
        bound.apply_defaults()
        constants, addresses = list(bound.arguments.values()), []
        for place, value in enumerate(constants):
            if isinstance(value, Tensor):
                if id(value) not in self._origins:
                    return None
                addresses.append((place, *self._origins[id(value)]))
                constants[place] = None
        return compiled[(*grid, 1, 1)[:3]], constants, addresses


def _has_no_tensors(values: Any) -> bool:
    """Whether an operator did no more than tell from constants: torch.promote_types."""
    return not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(values))


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
