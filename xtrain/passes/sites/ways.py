"""How the values of a forward reach one another: what a sum adds, and by which ways it depends.

The ways of a flat graph (`Program`), each with how near it stays to the value where it begins and
whether parameters lie on it. A branch that a dropout covers reaches nothing behind its add.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from xtrain import torch_compat
from xtrain.passes.graph import (
    CONTRACTION,
    called_bodies,
    is_library_op,
    is_parameter,
    is_table,
    is_xtrain_op,
    may_hold_floats,
    module_path,
    ndim_of,
    op_name,
    operand,
    reach,
    reads_form_alone,
    same_sizes,
    tensor_meta,
)
from xtrain.passes.sites.carried import form_or_norm_of, mixed_streams, part_of
from xtrain.passes.sites.program import (
    KERNEL,
    Program,
    is_item,
    is_read_unfilled,
    written_into,
)
from xtrain.passes.sites.spell_out_sums import summand_of
from xtrain.passes.sites.sums import held_operands, stack_summed_by

# Where the value of a node comes from: how near it stays to the source of an edge.
CARRIES, ALONE, COMPUTED = 0, 1, 2
_STACKS = frozenset({"stack", "cat", "concat", "concatenate"})
# A module by the outermost number in its path, and whether the path goes on to one inside of it.
_LAYER = re.compile(r"(?P<list>.*?)\b(?P<number>\d+)\b(?P<inside>\.?)")
_CHUNKS = frozenset({"chunk", "split", "split_with_sizes", "tensor_split", "unbind"})


class Label(NamedTuple):
    """How a value reaches an addend: at its nearest, and whether parameters lie on any way."""

    nearest: int
    has_parameters: bool

    @property
    def is_skip(self) -> bool:
        """Whether the addend is the value itself, or a form of it alone."""
        return self.nearest == CARRIES or (self.nearest == ALONE and not self.has_parameters)

    @property
    def is_computed(self) -> bool:
        """Whether every way goes through parameters or an opaque op."""
        return self.nearest == COMPUTED


class Ways:
    """The values of a program and the ways between them.

    live: activations; parameters: those and what is made of them alone; the rest are tables and
    numbers. order: node -> its place in the running order.
    """

    def __init__(self, program: Program):
        self.program = program
        self.branches = program.branches
        self.nodes = list(program.graph.nodes)
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.parameters: set[fx.Node] = set()
        self.live: set[fx.Node] = set()
        self.made_unseen: dict[fx.Node, str] = {}  # value that no op has made -> what is known
        self.picked: set[fx.Node] = set()  # rows of parameters, by indices: experts, embeddings
        self._classify()
        self._sources = {node: list(self._edges(node)) for node in self.nodes}

    # --- values ---------------------------------------------------------------------------------

    def _classify(self) -> None:
        """Tell parameters and what is made of them, and activations, from tables and numbers."""
        for node in self.nodes:
            role = node.meta.get("role")
            if node.op == "output":
                continue
            if origin := self._unseen_origin(node):
                self.live.add(node)
                self.made_unseen[node] = origin
            elif node.op in ("placeholder", "get_attr"):
                if role == "parameter" or (role is None and is_parameter(node)):
                    self.parameters.add(node)
                elif role == "input" or (role is None and _is_activation(node)):
                    self.live.add(node)
            else:
                self._classify_result(node)

    def _classify_result(self, node: fx.Node) -> None:
        inputs = node.all_input_nodes
        if inputs and all(n in self.parameters for n in inputs):
            self.parameters.add(node)
        elif may_hold_floats(node) and any(map(self._is_known, inputs)):
            self.live.add(node)
            floats = list(filter(may_hold_floats, inputs))
            if floats and all(n in self.parameters or n in self.picked for n in floats):
                self.picked.add(node)

    def _unseen_origin(self, node: fx.Node) -> str:
        """What is known of a value that code past torch's ops has made; "" of any other."""
        if "place" not in node.meta or ndim_of(node) < 2 or not may_hold_floats(node):
            return ""
        if node in self.program.returned and not any(map(self._is_known, node.all_input_nodes)):
            return f"what {self.program.returned[node]} returned was made past torch's ops"
        return "its memory was filled past torch's ops" if is_read_unfilled(node) else ""

    def _is_known(self, node: fx.Node) -> bool:
        return node in self.live or node in self.parameters

    def _edges(self, node: fx.Node) -> Iterator[tuple[fx.Node, int, bool]]:
        """The values that a node is computed from: (source, how near it stays, by parameters)."""
        if node.op in ("placeholder", "get_attr", "output"):
            return
        member = _copied(node) or _member(node)
        if member is not None:
            yield (member, CARRIES, False)
            return
        inputs = [
            n for n in node.all_input_nodes if n in self.live and not reads_form_alone(node, n)
        ]
        if node.target is written_into or (is_item(node) and tensor_meta(node.args[0]) is None):
            yield from ((n, CARRIES, False) for n in inputs)
            return
        addends = set(self.product_addends(node)[:1] or self.addends(node) or self._held(node))
        given = [n for n in node.all_input_nodes if n in self.parameters]
        opaque = self.is_opaque(node)
        carried = None if opaque else form_or_norm_of(node) or part_of(node) or _stacked_form(node)
        carries_all = op_name(node) in _STACKS or stack_summed_by(node) is not None
        mixed = None if opaque else mixed_streams(node)
        if op_name(node) in CONTRACTION:
            given += [n for n in inputs if n in self.picked]
        matrix = opaque or any(ndim_of(p) >= 2 for p in given)
        for source in inputs:
            if carries_all or source in addends or source is carried or source is mixed:
                yield (source, CARRIES, bool(given))
            else:
                yield (source, COMPUTED if matrix else ALONE, bool(given) or opaque)

    def is_opaque(self, node: fx.Node) -> bool:
        """Whether what a node does is not known by its name: another library's op, a control flow.

        A module that is called as one, and a body that runs many times, hold their own parameters.
        """
        if node.op == "call_module" or KERNEL in node.meta or node in self.made_unseen:
            return True
        if isinstance(node.target, torch_compat.HigherOrderOperator):
            if op_name(node) in CONTRACTION:  # flex_attention
                return False
            bodies = called_bodies(self.program.origin.get(node, node))
            return bool(bodies) or "place" in node.meta  # recorded, so that no body shows
        return is_library_op(node.target)

    def addends(self, node: fx.Node) -> list[fx.Node]:
        """The activations that a node adds up, [] where it adds fewer than two."""
        if node.op not in ("call_function", "call_method") or not may_hold_floats(node):
            return []
        if tensor_meta(node) is None or ndim_of(node) < 2 or is_xtrain_op(node):
            return []
        found = self._held(node)
        if not found and node not in self.parameters:
            found = self._merged_addends(node) or self.product_addends(node)
        return found if len(found) > 1 else []

    def _held(self, node: fx.Node) -> list[fx.Node]:
        held = [o for _, o in held_operands(node) if isinstance(o, fx.Node)]
        held = [o for o in held if ndim_of(o) > 1]  # a vector is a bias, whatever it was made of
        return list(dict.fromkeys(o for o in held if o in self.live))

    def _merged_addends(self, node: fx.Node) -> list[fx.Node]:
        """Stacked values that an op adds up along the stack, in a spelling that sums.py has not.

        What views, casts, scales, projects or attends to a stack keeps its values apart.
        """
        name = op_name(node)
        if name not in SUMS_OVER_DIM:
            return []
        for source in node.all_input_nodes:
            stack: fx.Node | None = source
            while stack is not None and op_name(stack) not in _STACKS:
                stack = form_or_norm_of(stack)
            if stack is None or stack_summed_by(node) is not None:
                continue
            values = operand(stack, 0, "tensors")
            if not isinstance(values, list | tuple) or not _along_stack(node, source, stack):
                continue
            live = [v for v in values if isinstance(v, fx.Node) and v in self.live]
            return list(dict.fromkeys(_unsqueezed(v) for v in live))
        return []

    def product_addends(self, node: fx.Node) -> list[fx.Node]:
        """What a product of matrices adds (spell_out_sums.py left it as it is), and a factor."""
        summand = summand_of(node)
        factors = [n for n in node.all_input_nodes if n is not summand and n in self.live]
        return [summand, *factors[:1]] if summand in self.live else []

    # --- ways -----------------------------------------------------------------------------------

    def labels(self, value: fx.Node, blocked: set[fx.Node]) -> dict[fx.Node, Label]:
        """Every value that reaches `value`, with how; a branch reaches nothing behind its add."""
        labels = {value: Label(CARRIES, False)}
        heap = [-self.order[value]]
        seen = {value}
        while heap:
            node = self.nodes[-heapq.heappop(heap)]
            if node in blocked:
                continue
            at = labels[node]
            cut = self.branches.get(node, ())
            for source, step, by_parameters in self._sources[node]:
                if source in cut:
                    continue
                label = Label(max(at.nearest, step), at.has_parameters or by_parameters)
                known = labels.get(source)
                if known is not None:
                    label = Label(
                        min(known.nearest, label.nearest),
                        known.has_parameters or label.has_parameters,
                    )
                labels[source] = label
                if source not in seen:
                    seen.add(source)
                    heapq.heappush(heap, -self.order[source])
        return labels

    def spine(self) -> set[fx.Node]:
        """What reaches the forward's main results without passing through a branch."""
        outputs = [n for n in self.nodes if n.op == "output"]
        results = [n for out in outputs for n in out.all_input_nodes if n in self.live]
        return set(reach(self.main(results), self._live_sources))

    def _live_sources(self, node: fx.Node) -> list[fx.Node]:
        cut = self.branches.get(node, ())
        return [n for n in node.all_input_nodes if n in self.live and n not in cut]

    def main(self, results: list[fx.Node]) -> list[fx.Node]:
        """The results that depend on most sites: keys and values kept for later depend on fewer."""
        adds = {add for add, found in self.branches.items() if found}
        reached = [adds & self.ancestors(result) for result in results]
        return [
            result
            for result, found in zip(results, reached, strict=True)
            if not any(found < other for other in reached)
        ]

    def carried(self, value: fx.Node) -> set[fx.Node]:
        """The values that a value is a form of, or that its stream began with."""
        return {n for n, label in self.labels(value, set()).items() if label.nearest == CARRIES}

    def ancestors(self, node: fx.Node) -> set[fx.Node]:
        """A value and all that it comes from."""
        return set(reach([node]))

    def runs_through_layers(self, nodes: Sequence[fx.Node]) -> bool:
        """Whether of nodes in running order some of one layer read those of another.

        Layers are members of one list of modules that hold others: no list of matrices.
        """
        found = {node: at for node in nodes if (at := _LAYER.match(module_path(node)))}
        lists = {at["list"] for at in found.values() if at["inside"]}
        passed: dict[fx.Node, set[tuple[str, str]]] = {}
        for node in nodes:
            layers = set().union(*(passed.get(n, ()) for n in node.all_input_nodes))
            if (at := found.get(node)) and at["list"] in lists:
                own = at["list"], at["number"]
                if any(layer[0] == own[0] and layer != own for layer in layers):
                    return True
                layers.add(own)
            passed[node] = layers
        return False

    def beside(self, root: fx.Node, branch: fx.Node) -> list[fx.Node]:
        """What a branch comes from and root does not, past the branches of sites, in order."""
        before = self.ancestors(root)
        found, pending = set(), [branch]
        for node in pending:
            if node in found or node in before:
                continue
            found.add(node)
            cut = self.branches.get(node, ())
            pending += (n for n in node.all_input_nodes if n not in cut)
        return sorted(found, key=self.order.__getitem__)

    def reading(self, values: set[fx.Node], nodes: list[fx.Node]) -> list[fx.Node]:
        """Those of nodes, in running order, that come from one of some values."""
        found: dict[fx.Node, None] = {}
        for node in nodes:
            if any(n in values or n in found for n in node.all_input_nodes):
                found[node] = None
        return list(found)

    def between(self, root: fx.Node, branch: fx.Node) -> tuple[list[fx.Node], set[fx.Node]]:
        """The nodes on the ways from root to branch, nearest the branch first; root's readers."""
        reached = {root}
        for node in self.nodes[self.order[root] + 1 : self.order[branch] + 1]:
            cut = self.branches.get(node, ())
            if any(n in reached and n not in cut for n in node.all_input_nodes):
                reached.add(node)

        def inside(node: fx.Node) -> list[fx.Node]:
            cut = {root, *self.branches.get(node, ())}
            return [n for n in node.all_input_nodes if n in reached and n not in cut]

        return sorted(reach([branch], inside), key=lambda n: -self.order[n]), reached


# Ops that may add values up along a dimension, beside those that sums.py reads as sums.
SUMS_OVER_DIM = frozenset(
    "sum mean nansum nanmean cumsum cumsum_ logcumsumexp einsum matmul bmm tensordot conv1d conv2d "
    "avg_pool1d avg_pool2d adaptive_avg_pool1d trace".split()
)


def _along_stack(node: fx.Node, source: fx.Node, stack: fx.Node) -> bool:
    """Whether a node may add up what is stacked: its result has fewer values, or a running sum."""
    if "cumsum" in op_name(node):
        return True
    result, given = tensor_meta(node), tensor_meta(source)
    if result is None or given is None:
        return False
    members = operand(stack, 0, "tensors")
    member = tensor_meta(members[0]) if members else None
    # A sum over the stack has the size of one member; one over another dim, or a norm, has not.
    return member is not None and _same_count(result, member)


def _same_count(a: torch.Tensor, b: torch.Tensor) -> bool:
    return statically_known_true(a.numel() == b.numel())


def _unsqueezed(node: fx.Node) -> fx.Node:
    """The value that was given one more dim to be concatenated."""
    if op_name(node) in ("unsqueeze", "view", "reshape", "getitem") and node.all_input_nodes:
        source = node.all_input_nodes[0]
        return source if tensor_meta(source) is not None else node  # one of several results
    return node


def _copied(node: fx.Node) -> fx.Node | None:
    """What is written over the whole of another value."""
    value = operand(node, 1, "src") if op_name(node) == "copy_" else None
    return value if isinstance(value, fx.Node) else None


def _member(node: fx.Node) -> fx.Node | None:
    """The one value of a stack that a node takes out again: stack((x, h))[0], unbind, select."""
    name = op_name(node)
    if name not in ("getitem", "select") or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source, index = node.args[0], node.args[-1]
    if not isinstance(index, int):
        return None
    inner = op_name(source)
    if inner in _CHUNKS:
        cut = source.all_input_nodes[0]
        count = len(source.meta.get("example_value", source.meta.get("val", ())) or ())
        values = _stacked(cut)
        whole = inner == "unbind" if op_name(cut) == "stack" else inner != "unbind"
        return values[index] if values and len(values) == count and whole else None
    values = _stacked(source) if op_name(source) == "stack" else None
    dim = operand(source, 1, "dim", default=0)
    at = node.args[1] if name == "select" else 0
    return values[index] if values and dim == at and index < len(values) else None


def _stacked(node: fx.Node) -> Sequence[fx.Node] | None:
    if op_name(node) not in _STACKS:
        return None
    values = operand(node, 0, "tensors")
    if isinstance(values, list | tuple) and all(isinstance(v, fx.Node) for v in values):
        return values
    return None


def _stacked_form(node: fx.Node) -> fx.Node | None:
    """One value given further dims, or repeated: the streams of a hyper-connection begin so."""
    if op_name(node) in ("expand", "repeat", "broadcast_to", "expand_as", "tile"):
        value = operand(node, 0, "input", "self")
        return value if isinstance(value, fx.Node) else None
    return None


def _is_activation(node: fx.Node) -> bool:
    value = tensor_meta(node)
    return value is not None and may_hold_floats(node) and value.ndim >= 2 and not is_table(node)


def shape_of(node: fx.Node) -> torch.Size:
    """The shape of a tensor, () for anything else."""
    value = tensor_meta(node)
    return torch.Size(()) if value is None else value.shape


def same_rows(node: fx.Node, shape: torch.Size) -> bool:
    """Whether a value has a sum's shape, or is viewed so: as many rows, flattened or not."""
    value = tensor_meta(node)
    if value is None or value.ndim < 2 or not shape:
        return False
    is_view = same_sizes(value.shape[-1:], shape[-1:])
    return is_view and statically_known_true(value.numel() == math.prod(shape))


def has_shape(node: fx.Node, shape: torch.Size) -> bool:
    """Whether a node is a tensor of a shape."""
    value = tensor_meta(node)
    return value is not None and same_sizes(value.shape, shape)
