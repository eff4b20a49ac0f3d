"""What strict mode refuses in a training forward, and how it is said: where, why, what to do.

    check_can_drop, check_model_unchanged   before a forward
    recorded              a forward whole, where something new may run in it (forward_program.py)
    check_covered         the sites and the account of each graph, as it is compiled
    failures_explained    a backend that fails: Dynamo would leave code to eager, without dropout
    check_forward         behind a forward: the account of all of it, and the sites that ran
    check_has_values      in place of an error of a model that was left on meta

Where code was left to eager, a message says why: Dynamo's graph breaks, the backend's failures.
A backend that reads a value while it traces (an op whose backward calls `tolist`) raises what
Dynamo answers with a graph break: it traces one function less, and so on inwards, each time anew.
Where the op lies inside a residual branch, the function that holds the add is never compiled;
strict mode learns so from the first failure rather than from the last, minutes later.
"""

from __future__ import annotations

import itertools
import linecache
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from xtrain import torch_compat
from xtrain.compiler.compile_report import SumLine, line_of, place_of, plain_path, readable_path
from xtrain.compiler.compile_session import Call, Session, SiteError
from xtrain.compiler.forward_program import ForwardProgram
from xtrain.ops.dropout.op import FORWARD as DROPOUT_OP
from xtrain.passes import INSERT_RESIDUAL_DROPOUT
from xtrain.passes.graph import short_place, tensor_meta, walk_graphs
from xtrain.passes.sites.insert_residual_dropout import InsertResult
from xtrain.passes.sites.program import LIBRARY_OP
from xtrain.passes.sites.sum_account import HANDED_ON, IN_AN_OP, OPAQUE, SumEntry

_MAX_BREAKS = 3
_MAX_LINES_ABOVE = 10
_RANDOM = re.compile(r"\b(rand\w*|random\w*|uniform\w*|bernoulli\w*)\b")
# How Dynamo's reasons begin, or what they hold, where code depends on the value of a tensor.
_BY_VALUE = re.compile(
    r"generic_jump|data[- ]dependent|Dynamic shape operator|\.item\(\)|local_scalar_dense", re.I
)
_BY_CHANCE = (
    "What runs there is decided at random, which no graph can hold (layer drop: set its probability"
    " to 0 before the model is built, in transformers config.layerdrop, encoder_layerdrop and "
    "decoder_layerdrop; a step that leaves a layer out has fewer sites than another)"
)
_VALUES = (
    "Write that part without sizes and branches that depend on values (experts as grouped or "
    "batched products; in transformers models that take it experts_implementation='batched_mm', or "
    "'grouped_mm' on bfloat16 weights)"
)
_UNTRACEABLE = (
    "Write that op without values that are read on the host (in transformers: "
    "experts_implementation='batched_mm', or 'grouped_mm' on bfloat16 weights), or pass "
    "strict=False to train without dropout there."
)
_PER_BLOCK = (
    "Under compile_blocks what lies outside the blocks is in no graph (use xtrain.compile), nor "
    "are layers past Dynamo's recompile_limit, where something other than weights differs between "
    "them (TORCH_LOGS=recompiles says what; a key-value cache may: use_cache=False)"
)


# --- before a forward -----------------------------------------------------------------------------


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


def check_model_unchanged(session: Session) -> None:
    """Raise where a training forward would run other blocks than those that were compiled."""
    if session.is_replaced:
        raise RuntimeError(
            f"compile_blocks was called on this {type(session.model).__name__} again, and its "
            "blocks run the graphs of the last call; use the CompiledModel that it returned"
        )
    if session.options.strict and (change := session.blocks.changed_list()):
        raise session.not_as_compiled(change)


def check_has_values(model: nn.Module, error: Exception) -> None:
    """Raise instead of an error of the first forward of a model that was left on meta."""
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise RuntimeError(
                f"{name} of {type(model).__name__} is on the meta device and has no values: load "
                "the weights, or model.to_empty(device=...) and initialise them, before a forward"
            ) from error


@contextmanager
def recorded(
    session: Session, call: Call | None, inputs: list[torch.Tensor]
) -> Iterator[ForwardProgram | None]:
    """Record a training forward whole where something new may run in it."""
    session.breaks_at_start = len(torch_compat.graph_breaks())
    if call is None or not session.is_recording_wanted or torch_compat.in_backward():
        yield None
        return
    session.is_recording_wanted = False
    session.recording = program = ForwardProgram(inputs)
    try:
        with program, torch_compat.noting_launches(program.note_launch):
            yield program
    finally:
        session.recording = None


# --- the account of sums --------------------------------------------------------------------------


def check_covered(session: Session, inserted: InsertResult) -> None:
    """Report what a graph leaves without dropout; raise SiteError for it in strict mode."""
    lines = [
        f"{slot.kind} in {readable_path(slot.path)}: {slot.reason}"
        for slot in inserted.slots
        if not slot.covered_by
    ]
    account = inserted.found.account if inserted.found else None
    if account and not session.per_block:
        session.report.account = _counted(account.entries)
        lines += [_said_of(e) for e in account.entries if e.verdict == "unexplained"]
    if (lines := _reported(session, lines)) and session.options.strict:
        raise SiteError(_refusal(session, lines))


def _reported(session: Session, lines: Iterable[str]) -> list[str]:
    """List what trains without dropout in the report, each line once; return the lines."""
    lines = list(dict.fromkeys(lines))
    session.report.uncovered = list(dict.fromkeys([*session.report.uncovered, *lines]))
    return lines


def _counted(entries: Iterable[SumEntry]) -> list[SumLine]:
    """Return the account as reports keep it: equal verdicts by one rule in one line."""
    counts = Counter(
        (e.verdict, e.seen if e.verdict == "unexplained" else e.rule, e.settled) for e in entries
    )
    return [SumLine(v, rule, n, settled) for (v, rule, settled), n in counts.items()]


def _said_of(entry: SumEntry) -> str:
    """Return a line for a sum that is open: what was seen of it, and how to settle it."""
    add, seen = entry.add, entry.seen
    at, place = place_of(add), plain_path(add) or short_place(line_of(add))
    if entry.verdict != "unexplained":  # a residual sum; no graph shows the whole of it
        where = "gets a branch and a stream from different graphs"
        where = "ran outside of the compiled graphs" if "place" in add.meta else where
        return f"the add at {at} {where}: {seen}"
    if entry.rule == OPAQUE:
        return (
            f"the op at {at} takes and returns a stream, and {seen}: it may hold a residual sum. "
            f"Write the sum outside of it, or say that it holds none: sums={{{place!r}: 'leave'}}"
        )
    if entry.rule == HANDED_ON:
        return (
            f"the value at {at} was dropped as a branch that its block returns beside the stream, "
            "and no code adds it to that stream: use xtrain.compile, whose graph shows what it is"
        )
    if entry.rule == IN_AN_OP:
        return (
            f"the body of {add.meta[LIBRARY_OP]} adds at {at}, where no pass can put dropout: "
            f"{seen}. Write the sum outside of the op, or say that it is to have none: "
            f"sums={{{place!r}: 'leave'}}"
        )
    return (
        f"the add at {at} may be a residual site: {seen}. Say what it is: sums={{{place!r}: "
        "'drop'} puts dropout on the addend that is no skip (of two such, the last), 'leave' "
        "leaves the sum alone"
    )


# --- behind a forward -----------------------------------------------------------------------------


def check_forward(
    session: Session, call: Call, program: ForwardProgram | None, result: Any
) -> None:
    """Report what a forward left without dropout; in strict mode raise SiteError for it.

    Args:     program: the forward as it was recorded, if it was.
    """
    open_sums = _open_sums(session, program, result)
    if not session.options.strict:
        return
    if not call.executed and not call.switched_off:
        raise SiteError(_nothing_ran(session, open_sums))
    if open_sums:
        raise SiteError(_refusal(session, open_sums))
    executed = {*call.executed, *call.switched_off}
    missing = [s.name for s in session.sites.values() if s not in executed]
    if missing:
        breaks = _breaks_said(session)
        raise SiteError(
            f"a training forward ran {len(executed)} residual sites of {len(session.sites)}; "
            f"missing: {', '.join(missing[:5])}. {_left_out(session, call)}A part of the model was "
            "skipped, or Dynamo fell back to eager there (TORCH_LOGS=graph_breaks,recompiles says "
            "why). strict=False trains without dropout there."
            f"{f' {breaks}.' * bool(breaks)}{_failures_said(session)}"
        )


def _open_sums(session: Session, program: ForwardProgram | None, result: Any) -> list[str]:
    """Judge the sums of a recorded forward; report and return those that are left open.

    A forward that was one graph has been judged when that was compiled.
    """
    if program is not None:
        session.is_one_graph = program.is_one_graph
    if program is None or (program.is_one_graph and not session.per_block):
        return []
    account, open_ = program.judge(result, session.options.settled)
    session.report.account = _counted(account.entries)
    return _reported(session, map(_said_of, open_))


def _left_out(session: Session, call: Call) -> str:
    """Which blocks did not run at all, where each runs a graph of its own."""
    paths = [path for path in session.blocks.paths if path not in call.blocks]
    if not session.per_block or not paths:
        return ""
    return f"{', '.join(paths[:5])} did not run in this forward: {_BY_CHANCE}. "


def _nothing_ran(session: Session, open_sums: list[str]) -> str:
    name, p = type(session.model).__name__, session.options.dropout
    said = f"dropout={p}, but the training forward of {name} ran no residual site: "
    if INSERT_RESIDUAL_DROPOUT in session.options.disable_passes:
        return f"{said}disable_passes leaves out {INSERT_RESIDUAL_DROPOUT}. Use dropout=0 for none."
    if open_sums:
        said += f"Dynamo fell back to eager ({'; '.join(open_sums[:3])})"
    else:
        said += "no branch with parameters is added back onto the value that it reads"
    return (
        f"{said}. {_cause_said(session)}TORCH_LOGS=graph_breaks,recompiles says what torch.compile "
        f"left out; dropout=0 trains without any.{_failures_said(session)}"
    )


def _refusal(session: Session, lines: list[str]) -> str:
    """Return the message of the error that strict mode raises for these lines."""
    return (
        f"a residual site gets no dropout: {'; '.join(lines)}. {_cause_said(session)}strict=False "
        f"trains without dropout there, and lists it in the report.{_failures_said(session)}"
    )


# --- why code was left to eager -------------------------------------------------------------------


def _cause_said(session: Session) -> str:
    """Say why code of a model was left to eager, as far as that is known, "" if it is not."""
    if breaks := _breaks_said(session):
        return f"{breaks} (TORCH_LOGS=graph_breaks shows where a graph broke). "
    return f"{_PER_BLOCK}. " if session.per_block else ""


def _failures_said(session: Session) -> str:
    """Say what the backend has failed with so far, "" if it has not."""
    if not session.failures:
        return ""
    return f" It began with this: {'; '.join(session.failures)}. {_UNTRACEABLE}"


def _breaks_said(session: Session) -> str:
    """Say where graphs broke and what to do about it, "" if none did."""
    num_before = session.num_breaks_before
    found = torch_compat.graph_breaks()
    found = found[num_before if num_before <= len(found) else 0 :]  # fewer: Dynamo began anew
    breaks = list(dict.fromkeys(Break(place, reason) for place, reason in found))
    said = list(dict.fromkeys(map(str, breaks)))
    if not said:
        return ""
    if len(said) > 2 * _MAX_BREAKS:  # the cause is among the first, and what cut this add the last
        said[_MAX_BREAKS:-_MAX_BREAKS] = [f"{len(said) - 2 * _MAX_BREAKS} more"]
    others = [b for b in breaks if not b.is_random]
    advice = [_BY_CHANCE] if len(others) < len(breaks) else []
    advice += [_VALUES] if any(b.is_by_value for b in others) else []
    return f"The graph broke at {'; '.join(said)}. {'. '.join(advice or [others[0].advice])}"


@dataclass(frozen=True)
class Break:
    """One place where a graph broke: file and line, its code, and Dynamo's reason."""

    place: str
    reason: str

    @property
    def code(self) -> str:
        """The line of code, "" where the source is not there."""
        file, _, line = self.place.rpartition(":")
        return linecache.getline(file, int(line)).strip() if line.isdigit() else ""

    @property
    def is_random(self) -> bool:
        """Whether the code, or an assignment above it to one of its names, draws a number.

        Dynamo's reason shows how a condition was computed where it gives up the whole function.
        """
        if _RANDOM.search(self.code) or _RANDOM.search(self._why):
            return True
        file, _, line = self.place.rpartition(":")
        names = set(re.findall(r"[A-Za-z_]\w*", self.code))
        number = int(line) if line.isdigit() else 0
        for above in range(max(1, number - _MAX_LINES_ABOVE), number):
            name, is_assigned, value = linecache.getline(file, above).partition("=")
            if is_assigned and name.strip() in names and _RANDOM.search(value):
                return True
        return False

    @property
    def is_by_value(self) -> bool:
        """Whether a tensor's value decides what runs, or how large a result is."""
        return _BY_VALUE.search(self._why) is not None

    @property
    def _why(self) -> str:
        return self.reason.partition("Hint:")[0]

    @property
    def advice(self) -> str:
        """What to do where nothing more is known of it."""
        explanation = re.search(r"Explanation: ([^\n]*)", self.reason)
        says = f" (Dynamo: {explanation[1].rstrip('.')})" if explanation else ""
        return f"Take out what breaks it{says}"

    def __str__(self) -> str:
        why = self.reason.strip().partition("\n")[0].rstrip(":")
        code = f": `{self.code}`" if self.code else ""
        return f"{short_place(self.place)} ({why}{code})"


@contextmanager
def failures_explained(session: Session, module: fx.GraphModule) -> Iterator[None]:
    """Note what leaves code of a graph to eager; in strict mode raise if a site is lost by it.

    Args:     module: the graph with its dropout inserted.
    """
    with torch_compat.noting_backward_errors() as in_backward:
        try:
            yield
        except Exception as error:
            if not torch_compat.leaves_code_to_eager(error):
                raise
            place = torch_compat.frames(torch_compat.forward_stack(error, in_backward))
            failure = _described(session, error, place)
            failure += ", in its backward" if in_backward else ""
            if failure not in session.failures:
                session.failures.append(failure)
            if session.options.strict and _is_in_a_branch(module, place, bool(in_backward)):
                raise SiteError(
                    f"a residual site gets no dropout: {failure}. The op lies in the site's branch,"
                    " and torch.compile would leave the function that holds the add to eager. "
                    f"{_UNTRACEABLE}"
                ) from error
            raise


def _described(session: Session, error: Exception, place: list[tuple[str, str]]) -> str:
    first_line = str(error).strip().partition("\n")[0]
    where = "".join(f" on the op at {short_place(':'.join(frame))}" for frame in place[-1:])
    backend = session.options.backend
    return f"the backend {backend!r} failed with {type(error).__name__}: {first_line}{where}"


def _is_in_a_branch(module: fx.GraphModule, place: list[tuple[str, str]], by_grad: bool) -> bool:
    """Whether all that was traced at a place lies in residual branches of ours.

    Args:     by_grad: look only at what takes part in the backward.
    """
    found = False
    for part in dict.fromkeys(walk_graphs(module)):
        drops = [node for node in part.graph.nodes if node.target is DROPOUT_OP]
        inside = {node for drop in drops for node in _branch_of(drop)}
        ends = {*drops, *(user for drop in drops for user in drop.users)}
        for node in part.graph.nodes:
            at = torch_compat.frames(str(node.meta.get("stack_trace") or ""))
            if node.op in ("placeholder", "get_attr", "output") or at != place or node in ends:
                continue
            value = tensor_meta(node)
            if by_grad and (value is None or not value.requires_grad):
                continue
            if node not in inside:
                return False
            found = True
    return found and bool(place)


def _branch_of(drop: fx.Node) -> set[fx.Node]:
    """What a branch computes of its stream: behind the sum's other operands, before the dropout."""
    branch = drop.args[0]
    assert isinstance(branch, fx.Node)
    streams = [n for user in drop.users for n in user.all_input_nodes if n is not drop]
    reading = _reached(streams, lambda node: node.users)
    return (_reached([branch], lambda node: node.all_input_nodes) & reading) - set(streams)


def _reached(
    start: list[fx.Node], following: Callable[[fx.Node], Iterable[fx.Node]]
) -> set[fx.Node]:
    reached, pending = set(start), list(start)
    while pending:
        new = set(following(pending.pop())) - reached
        reached |= new
        pending += new
    return reached
