"""One set of tensor names for a model, however it is wrapped.

torch.compile, DistributedDataParallel and checkpoint wrappers put a segment of their own into the
names of a state_dict (`_orig_mod.`, `module.`, `_checkpoint_wrapped_module.`). Here names are those
of the plain model: a segment is dropped where the module at that place *is* such a wrapper, so that
a child truly named `_orig_mod` keeps its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from xtrain.checkpoint import CheckpointError

# class of torch -> the attribute under which it holds the wrapped module
WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}


def plain_name(name: str, modules: Mapping[str, nn.Module]) -> str:
    """Return a tensor's name in the plain model.

    Args: name: as state_dict() or named_parameters() of the wrapped model gives it; modules: its
          named_modules(remove_duplicate=False) as a dict.
    """
    path, plain = "", []
    for segment in name.split("."):
        child = _wrapped_child(modules.get(path))
        # some wrappers have taken their own segment out already: step over it
        while child is not None and segment != child:
            path = _join(path, child)
            child = _wrapped_child(modules.get(path))
        path = _join(path, segment)
        if child is None:
            plain.append(segment)
    return ".".join(plain)


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Return id(parameter) -> name in the plain model."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return {id(p): plain_name(name, modules) for name, p in model.named_parameters()}


def model_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return (name -> tensor, alias -> name): a tensor under two names, as a tied head, once."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple, str] = {}
    for name, tensor in _plain_state(model).items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and place in seen:
            aliases[name] = seen[place]
        else:
            seen[place] = name
            tensors[name] = tensor
    return tensors, aliases


@torch.no_grad()
def load_model_tensors(
    model: nn.Module, tensors: Mapping[str, Tensor], aliases: Mapping[str, str] | None = None
) -> None:
    """Copy tensors into the model in place, so that ties and compiled graphs stay valid.

    Names with wrapper segments, as other programs save them, are understood.
    Raises: CheckpointError naming what is missing, left over or of another shape.
    """
    tensors = dict(tensors)
    for alias, name in (aliases or {}).items():
        if name not in tensors:
            raise CheckpointError(f"the checkpoint has no tensor {name}, which {alias} is to be")
        tensors[alias] = tensors[name]
    own = _plain_state(model)
    found = _under_own_names(tensors, own)
    missing = [name for name in own if name not in found]
    left_over = [name for name in found if name not in own]
    shapes = [
        f"{name} is {tuple(found[name].shape)} in the checkpoint and {tuple(tensor.shape)} here"
        for name, tensor in own.items()
        if name in found and found[name].shape != tensor.shape
    ]
    if missing or left_over or shapes:
        problems = [
            *([f"missing: {_few(missing)}"] if missing else []),
            *([f"not in the model: {_few(left_over)}"] if left_over else []),
            *([_few(shapes)] if shapes else []),
        ]
        raise CheckpointError(
            f"the checkpoint does not fit the model; {'; '.join(problems)}. Use the configuration "
            "that it was saved with"
        )
    for name, tensor in own.items():
        tensor.copy_(found[name])


def _plain_state(model: nn.Module) -> dict[str, Tensor]:
    modules = dict(model.named_modules(remove_duplicate=False))
    state: dict[str, Any] = model.state_dict()
    return {plain_name(name, modules): t for name, t in state.items() if isinstance(t, Tensor)}


def _under_own_names(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of a file whose names carry wrapper segments to the model's own names."""
    by_stripped: dict[str, list[str]] = {}
    for name in own:
        by_stripped.setdefault(_stripped(name), []).append(name)
    found = {}
    for name, tensor in tensors.items():
        candidates = [name] if name in own else by_stripped.get(_stripped(name), [])
        found[candidates[0] if len(candidates) == 1 else name] = tensor
    return found


def _stripped(name: str) -> str:
    return ".".join(s for s in name.split(".") if s not in WRAPPERS.values())


def _wrapped_child(module: nn.Module | None) -> str | None:
    for base in type(module).__mro__:
        if base.__name__ in WRAPPERS and base.__module__.startswith("torch."):
            return WRAPPERS[base.__name__]
    return None


def _join(path: str, segment: str) -> str:
    return f"{path}.{segment}" if path else segment


def _few(items: list[str]) -> str:
    more = f" and {len(items) - 3} more" if len(items) > 3 else ""
    return ", ".join(items[:3]) + more
