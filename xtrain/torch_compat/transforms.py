"""Function transforms over our ops: vmap's levels, and forward mode, which the ops refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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
