"""A graph as plain data before and after the passes, and what became of each of its ops.

One Node an op, in running order, the bodies of calls in their places. Nodes keep the names that FX
gave them, which copies of a graph share: an op that no pass touched has one key before and after.
Parameters are no nodes; ops name them by their path in the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import torch
from torch import fx

from xtrain import torch_compat
from xtrain.compiler.compile_report import ENTRY_ROOT
from xtrain.passes.graph import body_operands, called_bodies, module_path, op_name
from xtrain.passes.sites.insert_residual_dropout import SEEDS

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in \S+\n\s*(.*)')
# One step of a source name on the way to a parameter, and the arguments of our own entry.
_STEP = re.compile(
    r"(?:^|\.)_(?:modules|parameters|buffers)\['([^']+)'\]|(?:^|\.)([A-Za-z_]\w*)|\[(\d+)\]"
)
_ARGUMENT = re.compile(r"L\['args'\]\[(\d+)\]|L\['(?:kwargs'\]\[')?(\w+)'\]")


@dataclass(frozen=True)
class Node:
    """One op of a graph.

    key:    unique in the graph: its name, behind "call/" for each body that it lies in.
    target: what it calls: "linear", "xtrain.rms_norm"; "input" and "output" for the graph's own.
    text:   the call with its arguments, as a line of Python.
    value:  what it returns: "f32[2, 16, 64]".
    module: path of the module whose code it is, "" for the model itself.
    block:  path of the block that holds that module, "" outside any.
    source: "file.py:12: code" of the line that it was traced from.
    inputs: keys of the nodes that it reads.
    depth:  how many bodies it lies in.
    row:    the site of its graph, counted from 0, whose seed it reads; None for all others.
    """

    key: str
    target: str
    text: str
    value: str
    module: str
    block: str
    source: str
    inputs: tuple[str, ...]
    depth: int = 0
    row: int | None = None

    @property
    def name(self) -> str:
        """The node's own name."""
        return self.key.rpartition("/")[2]


@dataclass
class Snapshot:
    """The nodes of one graph, and how many parameters and buffers it reads."""

    nodes: list[Node] = field(default_factory=list)
    num_parameters: int = 0

    def by_key(self) -> dict[str, Node]:
        """Return key -> node."""
        return {node.key: node for node in self.nodes}


def snapshot(module: fx.GraphModule, block_of: Callable[[str], str | None]) -> Snapshot:
    """Describe a graph and the bodies that it calls; block_of maps a module's path to its block."""
    reader = _Reader(block_of)
    reader.read(module.graph, "", 0)
    return reader.result


class _Reader:
    def __init__(self, block_of: Callable[[str], str | None]):
        self.block_of = block_of
        self.result = Snapshot()
        # What later nodes call a node, its key where it is listed, and the first row of the seeds
        # that it stands for.
        self.labels: dict[fx.Node, str] = {}
        self.keys: dict[fx.Node, str] = {}
        self.rows: dict[fx.Node, int] = {}

    def read(self, graph: fx.Graph, prefix: str, depth: int, operands: Any = None) -> None:
        for node in graph.nodes:
            self.labels[node] = node.name
            if node.op == "placeholder" and operands and node in operands:
                self._pass_on(node, operands[node])
            elif node.op == "placeholder" and self._is_of_the_model(node):
                self.result.num_parameters += 1
            elif node.op == "placeholder" and node.target == SEEDS:
                self.rows[node] = 0
            elif not self._is_body(node) and not self._is_part_of_seeds(node):
                self._list(node, prefix, depth)
                for body in called_bodies(node):
                    inside = f"{prefix}{node.name}/"
                    self.read(body.graph, inside, depth + 1, body_operands(node))

    def _pass_on(self, placeholder: fx.Node, value: Any) -> None:
        """Call a body's input by what is handed to it."""
        if isinstance(value, fx.Node):
            self.labels[placeholder] = self.labels[value]
            if value in self.keys:
                self.keys[placeholder] = self.keys[value]
            if value in self.rows:
                self.rows[placeholder] = self.rows[value]
        else:
            self.labels[placeholder] = repr(value)

    def _is_of_the_model(self, node: fx.Node) -> bool:
        """Label an input; whether it is a parameter or a buffer."""
        if path := parameter_path(node):
            self.labels[node] = path
            return True
        match = _ARGUMENT.fullmatch(torch_compat.source_name(node))
        if match is not None:
            self.labels[node] = match[2] or f"args[{match[1]}]"
        return isinstance(node.meta.get("example_value"), torch.nn.Parameter)

    @staticmethod
    def _is_body(node: fx.Node) -> bool:
        return node.op == "get_attr" and any(map(called_bodies, node.users))

    def _is_part_of_seeds(self, node: fx.Node) -> bool:
        """Whether a node only picks rows of the seeds input: its readers then say which."""
        source: Any = node.args[0] if op_name(node) == "getitem" else None
        if source not in self.rows:
            return False
        index: Any = node.args[1]
        if isinstance(index, slice):
            self.rows[node] = self.rows[source] + (index.start or 0) // 2
            self.labels[node] = f"seeds[{2 * self.rows[node]}:]"
        else:
            self.rows[node] = self.rows[source] + index // 2
            self.labels[node] = f"{'offset' if index % 2 else 'seed'}_{self.rows[node]}"
        return True

    def _list(self, node: fx.Node, prefix: str, depth: int) -> None:
        self.keys[node] = key = prefix + node.name
        module = readable_module(module_path(node))
        inputs = dict.fromkeys(self.keys[n] for n in node.all_input_nodes if n in self.keys)
        target, text = self._call(node)
        self.result.nodes.append(
            Node(
                key=key,
                target=target,
                text=text,
                value=value_text(node.meta.get("example_value", node.meta.get("val"))),
                module=module,
                block=self.block_of(module) or "",
                source=_source(node),
                inputs=tuple(inputs),
                depth=depth,
                row=self._row(node),
            )
        )

    def _row(self, node: fx.Node) -> int | None:
        if called_bodies(node):
            return None
        return next((self.rows[n] for n in node.all_input_nodes if n in self.rows), None)

    def _call(self, node: fx.Node) -> tuple[str, str]:
        if node.op == "placeholder":
            return "input", self.labels[node]
        if node.op == "output":
            return "output", self._argument(node.args[0])
        target = _target_name(node)
        bodies = [n for n in node.all_input_nodes if n.op == "get_attr" and self._is_body(n)]
        args = [self._argument(a) for a in node.args if a not in bodies]
        args += [f"{name}={self._argument(value)}" for name, value in node.kwargs.items()]
        return target, target if node.op == "get_attr" else f"{target}({', '.join(args)})"

    def _argument(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.labels.get(value, value.name)
        if isinstance(value, tuple | list):
            inside = ", ".join(map(self._argument, value))
            inside += "," if isinstance(value, tuple) and len(value) == 1 else ""
            return f"[{inside}]" if isinstance(value, list) else f"({inside})"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{k}: {self._argument(v)}' for k, v in value.items())}}}"
        if isinstance(value, slice):
            ends = ["" if v is None else self._argument(v) for v in (value.start, value.stop)]
            step = "" if value.step is None else f":{self._argument(value.step)}"
            return ":".join(ends) + step
        if value is Ellipsis:
            return "..."
        return str(value) if isinstance(value, torch.dtype | torch.device) else repr(value)


def _target_name(node: fx.Node) -> str:
    if node.op in ("call_method", "get_attr", "call_module"):
        return str(node.target)
    if isinstance(node.target, torch_compat.OpOverload):
        namespace, _, name = torch_compat.schema(node.target).name.partition("::")
        return f"{namespace}.{name}"
    return op_name(node) or str(node.target)


def parameter_path(node: fx.Node) -> str:
    """Return the path of the parameter, buffer or attribute that an input is, "" for another."""
    source = torch_compat.source_name(node)
    if source.startswith(ENTRY_ROOT) or "._parameters[" in source or "._buffers[" in source:
        return ".".join(a or b or c for a, b, c in _STEP.findall(readable_module(source)))
    return ""


def readable_module(path: str) -> str:
    """Return a module's path in the model from its source name in a graph, "" for the model.

    In a piece behind a graph break, paths begin at a variable of the frame: "self.mlp".
    """
    if path.startswith(ENTRY_ROOT):
        return path.removeprefix(ENTRY_ROOT).removeprefix(".")
    return re.sub(r"^L\['(\w+)'\]", r"\1", path)


def value_text(value: Any) -> str:
    """Return a tensor's dtype and shape, in short; "" for what is no tensor."""
    if isinstance(value, tuple | list):
        return ", ".join(map(value_text, value))
    if not isinstance(value, torch.Tensor):
        return ""
    name = str(value.dtype).removeprefix("torch.")
    short = re.sub(r"(f)loat|(u)int|(i)nt|(c)omplex", r"\1\2\3\4", name)
    return f"{short}[{', '.join(map(str, value.shape))}]"


def _source(node: fx.Node) -> str:
    """Return the innermost line that a node was traced from."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return ""
    file, line, code = frames[-1]
    return f"{Path(file).name}:{line}: {code.strip()}"


# --- what became of each op ----------------------------------------------------------------------

# What hands a part or another form of an op's result on: what it replaced, the op replaced.
_THIN = frozenset({"getitem", "to", "aten.to"})


@dataclass(frozen=True)
class Stage:
    """One pass on one graph: the graph that it was given and the graph that it left."""

    pass_name: str
    before: Snapshot
    after: Snapshot


@dataclass
class Changes:
    """From a traced graph to the compiled one.

    removed:  key of a traced op that is gone -> the pass that took it out.
    added:    key of a new op -> the pass that put it in.
    replaces: key of a new op -> keys of the traced ops whose place it took.
    """

    removed: dict[str, str] = field(default_factory=dict)
    added: dict[str, str] = field(default_factory=dict)
    replaces: dict[str, list[str]] = field(default_factory=dict)


def follow(before: Snapshot, after: Snapshot, stages: list[Stage]) -> Changes:
    """Follow each op from the traced graph to the compiled one through the passes between."""
    traced, compiled = before.by_key(), after.by_key()
    changes = Changes()
    origins: dict[str, list[str]] = {}
    for stage in stages:
        old, new = stage.before.by_key(), stage.after.by_key()
        for key in old.keys() - new.keys():
            if key in traced:
                changes.removed[key] = stage.pass_name
        for key in new.keys() - old.keys():
            changes.added[key] = stage.pass_name
        for key, replaced in _replaced(old, new).items():
            known = [o for k in replaced for o in ([k] if k in traced else origins.get(k, []))]
            origins[key] = list(dict.fromkeys(known))
    changes.removed = {k: v for k, v in changes.removed.items() if k not in compiled}
    changes.added = {k: v for k, v in changes.added.items() if k in compiled and k not in traced}
    order = {key: position for position, key in enumerate(traced)}
    for key in changes.added:
        gone = sorted(
            (k for k in origins.get(key, ()) if k in changes.removed), key=order.__getitem__
        )
        if gone:
            changes.replaces[key] = gone
    return changes


def _replaced(old: dict[str, Node], new: dict[str, Node]) -> dict[str, list[str]]:
    """Return new op -> the ops that one pass took out for it, in no particular order.

    Readers that stayed tell: where one read r and now reads n, n stands for r, and so for what only
    r needed. Ops are asked in running order, and each takes what no earlier one has taken.
    """
    removed, added = old.keys() - new.keys(), [key for key in new if key not in old]
    heads: dict[str, set[str]] = {key: set() for key in added}
    for key, node in new.items():
        earlier = old[key].inputs if key in old else ()
        if len(earlier) == len(node.inputs):
            for was, now in zip(earlier, node.inputs, strict=True):
                if was in removed and now in heads:
                    heads[now].add(was)
    for key in reversed(added):
        if new[key].target in _THIN:
            for source in new[key].inputs:
                if source in heads:
                    heads[source] |= heads[key]
    taken: set[str] = set()
    result = {}
    for key in added:
        if new[key].target in _THIN:
            continue
        pending, group = [k for k in heads[key] if k not in taken], []
        while pending:
            current = pending.pop()
            if current in taken or current not in removed:
                continue
            taken.add(current)
            group.append(current)
            pending += old[current].inputs
        if group:
            result[key] = group
    return result


def rows(before: Snapshot, after: Snapshot) -> Iterator[tuple[Node | None, Node | None]]:
    """Yield pairs of traced and compiled ops in running order; None where one side has none."""
    a, b = [n.key for n in before.nodes], [n.key for n in after.nodes]
    matcher = SequenceMatcher(None, a, b, autojunk=False)
    for _, a_start, a_end, b_start, b_end in matcher.get_opcodes():
        left, right = before.nodes[a_start:a_end], after.nodes[b_start:b_end]
        for i in range(max(len(left), len(right))):
            yield (
                left[i] if i < len(left) else None,
                right[i] if i < len(right) else None,
            )


# --- where sites stand ---------------------------------------------------------------------------


@dataclass
class SiteMark:
    """Where a residual site stands in a graph.

    names:      the sites of the report that it is: several in a graph that layers share.
    covered_by: "xtrain", "model", or "" with a reason.
    add:        key of the traced add; own: of the model's own dropout on the branch, or "".
    dropout:    key of the compiled op that draws the mask, "" where none of ours does.
    """

    names: list[str]
    kind: str
    covered_by: str
    reason: str
    add: str
    own: str
    dropout: str = ""

    @property
    def label(self) -> str:
        """What to call it in a line of text."""
        return ", ".join(self.names) or f"{self.kind} without dropout"


@dataclass
class GraphRecord:
    """One graph: as traced, as compiled, what happened between, its sites."""

    before: Snapshot
    after: Snapshot = field(default_factory=Snapshot)
    stages: list[Stage] = field(default_factory=list)
    changes: Changes = field(default_factory=Changes)
    sites: list[SiteMark] = field(default_factory=list)

    def pass_of(self, side: str, key: str) -> str:
        """Return the pass that took out a traced op (side "a") or put in a compiled one ("b")."""
        return (self.changes.removed if side == "a" else self.changes.added).get(key, "")

    def marks(self) -> dict[tuple[str, str], list[SiteMark]]:
        """Return (side, key) -> the sites of an op: their adds, masks and dropouts of the model."""
        found: dict[tuple[str, str], list[SiteMark]] = {}
        for mark in self.sites:
            spots = [("a", mark.add), ("b", mark.dropout or mark.add)]
            spots += [("a", mark.own), ("b", mark.own)] if mark.own else []
            for spot in spots:
                found.setdefault(spot, []).append(mark)
        return found
