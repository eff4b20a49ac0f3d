"""What strict mode holds a training forward to: the model as it was, and every site executed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from xtrain import torch_compat
from xtrain.compiler.graph_breaks import BY_CHANCE, breaks_said
from xtrain.compiler.recorder import Recorder
from xtrain.compiler.session import Call, Session, SiteError, not_there
from xtrain.compiler.uncovered import cause_said, counted, left_to_eager, refusal, unexplained
from xtrain.passes import INSERT_RESIDUAL_DROPOUT


def check_model_unchanged(session: Session) -> None:
    """Raise where a training forward would run other blocks than those that were compiled."""
    if session.is_replaced:
        raise RuntimeError(
            f"compile_blocks was called on this {type(session.model).__name__} again, and its "
            "blocks run the graphs of the last call; use the CompiledModel that it returned"
        )
    if session.options.strict and (change := session.blocks.changed_list()):
        raise not_there(session.model, change)


@contextmanager
def recording(
    session: Session, call: Call | None, inputs: list[torch.Tensor]
) -> Iterator[Recorder | None]:
    """Record a training forward whole where something new may run in it."""
    session.breaks_at_start = len(torch_compat.graph_breaks())
    if call is None or not session.is_recording_wanted or torch_compat.in_backward():
        yield None
        return
    session.is_recording_wanted = False
    session.recorder = recorder = Recorder(inputs)
    try:
        with recorder, torch_compat.noting_launches(recorder.note_launch):
            yield recorder
    finally:
        session.recorder = None


def account_lines(session: Session, recorder: Recorder | None, result: Any) -> list[str]:
    """Judge the sums of a recorded forward; report and return those that are left open.

    A forward that was one graph has been judged when that was compiled.
    """
    if recorder is not None:
        session.is_one_graph = recorder.is_one_graph
    if recorder is None or (recorder.is_one_graph and not session.per_block):
        return []
    account, open_ = recorder.judge(result, session.sums)
    report = session.report
    report.account = counted(account.entries)
    lines = [
        unexplained(entry) if entry.verdict == "unexplained" else left_to_eager(entry)
        for entry in open_
    ]
    lines = list(dict.fromkeys(lines))
    report.uncovered += [line for line in lines if line not in report.uncovered]
    return lines


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


def check_executed(session: Session, call: Call, open_sums: list[str]) -> None:
    """Hold the sites that a forward ran against the account and the report.

    Args:     open_sums: what `account_lines` said of it.
    """
    if not session.options.strict:
        return
    if not call.executed and not call.switched_off:
        raise SiteError(_nothing_ran(session, open_sums))
    if open_sums:
        raise SiteError(refusal(open_sums, session))
    executed = {*call.executed, *call.switched_off}
    missing = [s.name for s in session.sites.values() if s not in executed]
    if missing:
        raise SiteError(
            f"a training forward ran {len(executed)} residual sites of {len(session.sites)}; "
            f"missing: {', '.join(missing[:5])}. {_left_out(session, call)}A part of the model was "
            "skipped, or Dynamo fell back to eager there (TORCH_LOGS=graph_breaks,recompiles says "
            f"why). strict=False trains without dropout there.{_said(session)}"
        )


def _left_out(session: Session, call: Call) -> str:
    """Which blocks did not run at all, where each runs a graph of its own."""
    paths = [path for path in session.blocks.paths if path not in call.blocks]
    if not session.per_block or not paths:
        return ""
    return f"{', '.join(paths[:5])} did not run in this forward: {BY_CHANCE}. "


def _nothing_ran(session: Session, open_sums: list[str]) -> str:
    name, p = type(session.model).__name__, session.options.dropout
    said = f"dropout={p}, but the training forward of {name} ran no residual site: "
    if INSERT_RESIDUAL_DROPOUT in session.options.disable_passes:
        return f"{said}disable_passes leaves out {INSERT_RESIDUAL_DROPOUT}. Use dropout=0 for none."
    if open_sums:
        said += f"Dynamo fell back to eager ({'; '.join(open_sums[:3])})"
    else:
        said += "no branch with parameters is added back onto the value that it reads"
    cause = cause_said(session)
    return (
        f"{said}. {f'{cause}. ' * bool(cause)}TORCH_LOGS=graph_breaks,recompiles says what "
        f"torch.compile left out; dropout=0 trains without any.{session.failures_said()}"
    )


def _said(session: Session) -> str:
    """What broke the graphs, as a sentence behind another."""
    breaks = breaks_said(session.num_breaks_before)
    return f" {breaks}." * bool(breaks) + session.failures_said()
