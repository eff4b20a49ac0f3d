"""Calls of Triton kernels from inductor's code, at a fraction of what they cost the host eagerly.

A call of an op goes through torch's dispatcher, the Python of its implementation, and Triton's own
launcher, which looks at each argument to find the kernel compiled for them; a GPU that has little
to do waits for that. Everything but the addresses follows from shapes, strides, dtypes and
constants. So the first call with each of them runs the implementation and writes down what it does
(recording.py): which memory it takes and which compiled kernels it launches, with which
arguments. Later calls do just that, with the same kernels, so with the same bits.

Where inductor's code says all but the addresses, a call has a place of its own (Site) and is told
from others without a look at its tensors.

Where an implementation calls torch operators beside (attention by cuDNN, the copy of an input),
those are called again, in their order, without the Python around them. What cannot be written down
runs as it is, as a call of the op: what reads the values of tensors, writes to an input, or passes
a kernel more than addresses and constants (a descriptor holds an address).

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

from xtrain.ops.launch.code import Plan
from xtrain.ops.launch.recording import Recording

CALLS: dict[str, Replayed] = {}  # by the op's name; what inductor's code calls, or from SITES
MAX_PLANS = 1024  # of an op; only changing shapes make more, and then the oldest are long dead
ALIGNMENT = 16  # bytes: Triton compiles for addresses that are multiples of it, and for others


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
        self.state = state  # what beside its arguments the implementation goes by
        self._plans: dict[tuple[Any, ...], Plan | None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the op returns."""
        return self.call(args, kwargs)[0]

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return what the op returns, and the plan by which it was done, None if by none."""
        pointers: list[int] = []
        tensors: list[Tensor] = []
        device = args[0].get_device()
        key: list[Any] = [device, self.state(), *kwargs.items()]
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
            return self._record(plan_key, args, kwargs), None
        if plan is None:
            return self._op(*args, **kwargs), None
        return plan(tensors, pointers, device), plan

    def _record(self, key: tuple[Any, ...], args: Any, kwargs: Any) -> Any:
        # objects of their own: one tensor given twice is two arguments, which may differ next time
        args = pytree.tree_map_only(Tensor, torch.Tensor.detach, args)
        launching = import_module("xtrain.ops.launch.launching")
        recording = Recording(pytree.tree_leaves(args))
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


class Site:
    """A call in inductor's code that is always made with the same shapes, strides and constants.

    What is left to look at are addresses: where one is aligned otherwise than the last time, the
    call is for Replayed, whose key of a dozen parts a tensor costs more than the launch itself.
    """

    def __init__(self, replayed: Replayed):
        self._replayed = replayed
        self._plan: Plan | None = None
        self._state: Any = None
        self._device = 0
        self._places: list[tuple[int, bool]] = []  # of tensors, and of lists of them
        self._alignment: list[int] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the op returns."""
        tensors: list[Tensor] = []
        for place, is_list in self._places:
            if is_list:
                tensors += args[place]
            else:
                tensors.append(args[place])
        pointers = [tensor.data_ptr() for tensor in tensors]
        if (
            self._plan is None
            or [pointer % ALIGNMENT for pointer in pointers] != self._alignment
            or self._replayed.state() != self._state
        ):
            return self._call(args, kwargs)
        return self._plan(tensors, pointers, self._device)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result, plan = self._replayed.call(args, kwargs)
        if plan is not None:
            kinds = [isinstance(arg, list) for arg in args]
            self._places = [
                (i, kinds[i]) for i, arg in enumerate(args) if kinds[i] or isinstance(arg, Tensor)
            ]
            tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
            self._alignment = [tensor.data_ptr() % ALIGNMENT for tensor in tensors]
            self._device, self._state = args[0].get_device(), self._replayed.state()
            self._plan = plan
        return result


class _Sites(dict[tuple[str, str], Site]):
    def __missing__(self, key: tuple[str, str]) -> Site:
        site = self[key] = Site(CALLS[key[0]])
        return site


SITES = _Sites()  # by the op's name and all that is the same at each call, as text
