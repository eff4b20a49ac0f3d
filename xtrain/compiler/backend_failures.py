"""What Dynamo makes of a backend's failure, said in time: code left to eager, without dropout.

A backend that reads a value while it traces (an op whose backward calls `tolist`) raises what
Dynamo answers with a graph break: it traces one function less, and so on inwards, each time anew.
Where the op lies inside a residual branch, the function that holds the add is never compiled; a
strict session learns so from the first failure rather than from the last, minutes later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import fx

from xtrain import torch_compat
from xtrain.compiler.session import UNTRACEABLE, Session, SiteError
from xtrain.ops.dropout.op import FORWARD as DROPOUT_OP
from xtrain.passes.graph import short_place, tensor_meta, walk_graphs


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
            stack = torch_compat.forward_stack(error, in_backward)
            failure = _described(session, error, stack, bool(in_backward))
            if failure not in session.failures:
                session.failures.append(failure)
            place = torch_compat.frames(stack)
            if session.options.strict and _is_in_a_branch(module, place, bool(in_backward)):
                raise SiteError(
                    f"a residual site gets no dropout: {failure}. The op lies in the site's branch,"
                    " and torch.compile would leave the function that holds the add to eager. "
                    f"{UNTRACEABLE}"
                ) from error
            raise


def _described(session: Session, error: Exception, stack: str, in_backward: bool) -> str:
    backend = f"backend {session.options.backend!r}"
    what = f"{type(error).__name__}: {_first_line(error)}"
    place = torch_compat.frames(stack)[-1:]
    where = "".join(f" on the op at {short_place(f'{file}:{line}')}" for file, line in place)
    return f"the {backend} failed with {what}{where}{', in its backward' if in_backward else ''}"


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
    streams = [n for user in drop.users for n in user.all_input_nodes if n is not drop]
    assert isinstance(branch, fx.Node)
    reading, pending = set(streams), list(streams)
    while pending:
        new = set(pending.pop().users) - reading
        reading |= new
        pending += new
    needed, pending = {branch}, [branch]
    while pending:
        new = set(pending.pop().all_input_nodes) - needed
        needed |= new
        pending += new
    return (needed & reading) - set(streams)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
