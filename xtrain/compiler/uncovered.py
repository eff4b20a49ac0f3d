"""Say where a residual site gets no dropout, why, and what to do about it."""

from __future__ import annotations

import re

from torch import fx

from xtrain.compiler.backend_failures import short_place
from xtrain.compiler.graph_breaks import breaks_said
from xtrain.compiler.seeds import is_entry, readable_path
from xtrain.passes.crossed_adds import find_crossed_adds
from xtrain.passes.cut_adds import find_cut_adds
from xtrain.passes.insert_residual_dropout import InsertResult

_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*\n\s*(?P<code>[^\n]*)')


def uncovered_sites(
    module: fx.GraphModule, inserted: InsertResult, *, per_block: bool = False
) -> list[str]:
    """Return a line for each site of a graph that nobody's dropout covers."""
    lines = [
        f"{slot.kind} in {readable_path(slot.path)}: {slot.reason}"
        for slot in inserted.slots
        if not slot.covered_by
    ]
    if not is_entry(module):
        lines += [
            f"the add at {place_of(add)}: a graph break lies between the residual stream, the "
            "branch and their add, and the piece that adds them does not show which of its inputs "
            "is the branch, nor whose"
            for add in find_cut_adds(module.graph)
        ]
    elif per_block:
        lines += [
            f"the add at {place_of(add)}: its branch reads another stream of the block than the "
            "one that it is added to, and one block's graph does not show how the two depend on "
            "each other; use xtrain.compile"
            for add in find_crossed_adds(module.graph)
        ]
    return list(dict.fromkeys(lines))


def refusal(lines: list[str], num_breaks_before: int) -> str:
    """Return the message of the error that strict mode raises for these lines.

    Args:     num_breaks_before: graph breaks that Dynamo had listed before the model was compiled.
    """
    cause = breaks_said(num_breaks_before) or "Remove the cause"
    return (
        f"a residual site gets no dropout: {'; '.join(lines)}. {cause} (TORCH_LOGS=graph_breaks "
        "shows where a graph broke), or pass strict=False to train without dropout there."
    )


def place_of(node: fx.Node) -> str:
    """Return the file, line and code that a node was traced from, its name where none is known."""
    found = list(_LINE.finditer(str(node.meta.get("stack_trace", ""))))
    if not found:
        return node.name
    last = found[-1]
    return f"{short_place(last['file'])}:{last['line']}, `{last['code'].strip()}`"
