"""What strict mode holds a training forward to: the model as it was, and every site executed."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from xtrain import torch_compat
from xtrain.compiler.graph_breaks import BY_CHANCE, breaks_said, breaks_since
from xtrain.compiler.session import Call, Session, SiteError, not_there


def check_model_unchanged(session: Session) -> None:
    """Raise where a training forward would run other blocks than those that were compiled."""
    if session.is_replaced:
        raise RuntimeError(
            f"compile_blocks was called on this {type(session.model).__name__} again, and its "
            "blocks run the graphs of the last call; use the CompiledModel that it returned"
        )
    if session.options.strict and (change := session.blocks.changed_list()):
        raise not_there(session.model, change)


def check_can_drop(session: Session, tensors: Sequence[torch.Tensor]) -> None:
    """Raise where a training forward is called in a way in which no mask can be drawn."""
    name = type(session.model).__name__
    if torch_compat.in_function_transform():
        raise RuntimeError(
            f"the compiled {name} was called in training under a function transform of torch.func "
            "(vmap, grad, vjp, jvp), in which its graphs cannot run: call it on the whole batch, "
            "and take gradients by backward() or torch.autograd.grad"
        )
    if any(tensor.is_nested for tensor in tensors):
        raise TypeError(
            f"the compiled {name} was given a nested tensor, and masks are drawn for dense values: "
            "pad its rows (torch.nested.to_padded_tensor) and hand over a mask"
        )


def check_has_values(model: nn.Module, error: Exception) -> None:
    """Raise instead of an error of the first forward of a model that was left on meta."""
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise RuntimeError(
                f"{name} of {type(model).__name__} is on the meta device and has no values: load "
                "the weights, or model.to_empty(device=...) and initialise them, before a forward"
            ) from error


def check_executed(session: Session, call: Call) -> None:
    """Hold the sites that a forward ran against the report and the blocks against one another."""
    if not session.options.strict:
        return
    if not call.executed and not call.switched_off:
        raise SiteError(
            f"dropout={session.options.dropout}, but the training forward of "
            f"{type(session.model).__name__} ran no residual site: none was found, or Dynamo fell "
            "back to eager (TORCH_LOGS=graph_breaks,recompiles says why). Pass strict=False to "
            f"train without dropout.{_said(session)}"
        )
    executed = {*call.executed, *call.switched_off}
    missing = [s.name for s in session.sites.values() if s not in executed]
    if missing:
        raise SiteError(
            f"a training forward ran {len(executed)} residual sites of {len(session.sites)}; "
            f"missing: {', '.join(missing[:5])}. A part of the model was skipped, or Dynamo fell "
            "back to eager there (TORCH_LOGS=graph_breaks,recompiles says why). strict=False "
            f"accepts it.{_said(session)}"
        )
    _check_blocks_agree(session, call)


def _said(session: Session) -> str:
    """What broke the graphs, as a sentence behind another."""
    breaks = breaks_said(session.num_breaks_before)
    return f" {breaks}." * bool(breaks) + session.failures_said()


def _check_blocks_agree(session: Session, call: Call) -> None:
    """Blocks of one class in one list must have equally many sites.

    Across lists they need not: the blocks of an encoder and a decoder can share a class. A block
    that stands in several places of a list has the sites of each.
    """
    places = session.blocks.num_places
    counts = Counter(block for block, _ in session.sites)
    groups: dict[tuple[str, str], dict[str, int]] = {}
    for path, class_name in session.blocks.class_names.items():
        groups.setdefault((class_name, path.rpartition(".")[0]), {})[path] = counts.get(path, 0)
    for (class_name, _), per_block in groups.items():
        per_place = {path: n / places[path] for path, n in per_block.items()}
        if len(set(per_block.values())) > 1 and len(set(per_place.values())) > 1:
            listed = ", ".join(f"{path}: {n}" for path, n in per_block.items())
            left_out = [path for path in per_block if path not in call.blocks]
            cause = _cause(session, 0 in per_block.values(), left_out)
            raise SiteError(
                f"blocks of class {class_name} differ in their number of residual sites ({listed})"
                f"; {cause}. strict=False accepts it.{_said(session)}"
            )


def _cause(session: Session, has_none: bool, left_out: list[str]) -> str:
    """Why blocks of a class differ in their sites, as far as that is known.

    Args:     has_none: whether one has no site at all.
              left_out: the blocks that did not run by graphs of their own.
    """
    if session.per_block and left_out:
        return f"{', '.join(left_out)} did not run in this forward: {BY_CHANCE}"
    if session.per_block and has_none:
        return (
            "a pattern was missed in some, or Dynamo reached its recompile_limit: the "
            "layers share no graph when something other than weights differs between them "
            "(TORCH_LOGS=recompiles says what). A key-value cache may: use_cache=False"
        )
    if has_none and any(b.is_random for b in breaks_since(session.num_breaks_before)):
        return "those without any may not have run in this forward"
    return "a pattern was missed in some"
