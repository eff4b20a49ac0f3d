"""One reading of a graph: what its ops are, what values they make, and what reads, shares and
changes those.

It works on Dynamo's own graph (torch functions, tensor methods, higher-order bodies) and on aten
graphs alike: an op is recognised by its name, whatever spelling reached the graph.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from xtrain import torch_compat

# --- kinds of ops ---------------------------------------------------------------------------------


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The names that a kind of op can have in a Dynamo graph or an aten graph, in place (see
# `is_in_place`) or not.
ADD = _names("add add_ iadd __add__ __iadd__ __radd__")
SUB = _names("sub sub_ isub subtract __sub__ __isub__ __rsub__ rsub")
MUL = _names("mul mul_ imul multiply __mul__ __rmul__")
DIV = _names("div div_ truediv itruediv divide true_divide __truediv__")
NEG = _names("neg negative __neg__")
POWER = _names("pow __pow__")
SOFTMAX = _names("softmax _softmax _safe_softmax")
DROPOUT = _names(
    "dropout dropout_ native_dropout dropout1d dropout2d dropout3d feature_dropout "
    "feature_dropout_ alpha_dropout alpha_dropout_ feature_alpha_dropout feature_alpha_dropout_"
)
FILL = _names("masked_fill masked_fill_ where")
CAT = _names("cat concat concatenate")
STACK = CAT | {"stack"}
CUT = _names("chunk split tensor_split split_with_sizes")
PART = _names("getitem slice narrow")
CAST = _names("to _to_copy type type_as float half bfloat16 double convert_element_type")
COPY = _names("contiguous clone alias")
RESHAPE = _names("view reshape _unsafe_view view_as reshape_as flatten unflatten squeeze unsqueeze")
# mT and numpy_T: as Dynamo spells x.mT and x.T from torch 2.14 on; getattr before.
PERMUTE = _names("transpose swapaxes swapdims permute movedim moveaxis t mT numpy_T")
# One value seen in another form: what a residual operand may pass through on its way to the add.
VIEW_LIKE = CAST | COPY | RESHAPE | PERMUTE
# Ops that show the numbers of their first operand, or a part of them, in another place.
SHOWN = (VIEW_LIKE - {"clone"}) | PART | CUT
SHOWN |= _names(
    "unbind expand expand_as broadcast_to select detach diagonal as_strided real view_as_real "
    "view_as_complex getattr unfold"
)
# Fresh memory: what holds nothing yet, and what holds zeros.
UNFILLED = _names("empty empty_like empty_strided new_empty new_empty_strided")
BUFFERS = UNFILLED | {"zeros", "zeros_like", "new_zeros"}
# Ops that ask their second operand for its form alone.
FORM_OF_SECOND = _names("type_as view_as reshape_as expand_as")
ATTENTION_CALLS = _names(
    "scaled_dot_product_attention flex_attention multi_head_attention_forward "
    "_native_multi_head_attention"
)
CONTRACTION = ATTENTION_CALLS | _names(
    "linear matmul mm bmm addmm baddbmm addbmm einsum tensordot inner bilinear conv1d conv2d "
    "conv3d convolution grouped_mm _grouped_mm scaled_mm _scaled_mm scaled_grouped_mm "
    "_scaled_grouped_mm _transformer_encoder_layer_fwd"
)
# Where a convolution takes its number of groups.
_GROUPS_OF_CONVOLUTION = {"conv1d": 6, "conv2d": 6, "conv3d": 6, "convolution": 8}
# Higher-order calls that run one body once, its operands behind it in the arguments.
TRANSPARENT_CALLS = _names(
    "tag_activation_checkpoint wrap wrap_activation_checkpoint wrap_with_autocast"
)
_PYTHON_IN_PLACE = _names(
    "setitem iadd isub imul itruediv ifloordiv ipow imod iand ior ixor imatmul ilshift irshift"
)
_KNOWN_LIBRARIES = _names("aten prims xtrain torch_attn _c10d_functional")
_OPERATOR_NAMES = {operator.matmul: "matmul", operator.imatmul: "matmul"}


def op_name(node: fx.Node) -> str:
    """Return the bare name of a node's op: "linear" for F.linear, aten.linear.default or .linear().

    In-graph submodules and attributes have none: the result is then "".
    """
    target = node.target
    if node.op == "call_method":
        return str(target)
    if node.op != "call_function":
        return ""
    if isinstance(target, torch_compat.OpOverload):
        return torch_compat.schema(target).name.split("::")[-1]
    if isinstance(target, torch_compat.HigherOrderOperator | torch_compat.OpOverloadPacket):
        return target.__name__
    if target in _OPERATOR_NAMES:
        return _OPERATOR_NAMES[target]
    return getattr(target, "__name__", "")


def is_in_place(name: str) -> bool:
    """Whether an op's name says that it writes into its first operand: add_, iadd, setitem."""
    if name.startswith("__") or not name.endswith("_"):
        return name.strip("_") in _PYTHON_IN_PLACE
    return not name.endswith("__")


def is_call(node: fx.Node) -> bool:
    """Whether a node calls a function or a method: what a matcher may start at, or erase."""
    return node.op in ("call_function", "call_method")


def is_library_op(target: object) -> bool:
    """Whether an op is neither torch's nor ours, so that its name does not say what it does."""
    if not isinstance(target, torch_compat.OpOverload | torch_compat.OpOverloadPacket):
        return False
    name = getattr(target, "namespace", "") or str(target).partition(".")[0]
    return name not in _KNOWN_LIBRARIES


def is_xtrain_op(node: fx.Node) -> bool:
    """Return whether a node calls one of xtrain's own ops."""
    target = node.target
    return isinstance(target, torch_compat.OpOverload) and target.namespace == "xtrain"


def holds_contraction(node: fx.Node) -> bool:
    """Return whether a node multiplies matrices, itself or in a body that it calls.

    A depthwise convolution does not: each channel is a sum of its own shifted values.
    """
    if op_name(node) in CONTRACTION:
        return not _is_depthwise(node)
    if node.op == "call_module":
        module = _get_attribute(node.graph.owning_module, str(node.target))
        return any(p.ndim >= 2 for p in module.parameters()) if module is not None else False
    return any(holds_contraction(n) for body in called_bodies(node) for n in body.graph.nodes)


def _is_depthwise(node: fx.Node) -> bool:
    position = _GROUPS_OF_CONVOLUTION.get(op_name(node))
    weight = tensor_meta(operand(node, 1, "weight"))
    if position is None or weight is None:
        return False
    return weight.shape[1] == 1 and operand(node, position, "groups", default=1) != 1


def is_active_dropout(node: fx.Node) -> bool:
    """Return whether a node drops elements in this graph; F.dropout with p = 0 counts as absent."""
    if op_name(node) not in DROPOUT:
        return False
    if is_xtrain_op(node):
        return True
    p = operand(node, 1, "p", default=0.5)
    by_default = "alpha" not in op_name(node)
    training = operand(node, 2, "training", "train", default=by_default)
    return bool(p) and training is not False


def is_models_dropout(node: fx.Node) -> bool:
    """Return whether a node is a dropout of the model's, active or not, and hands on one tensor."""
    return op_name(node) in DROPOUT - {"native_dropout"} and not is_xtrain_op(node)


def is_absent_dropout(node: fx.Node) -> bool:
    """Return whether a node is a dropout that hands its operand on as it is (not in a pair)."""
    return op_name(node) in DROPOUT - {"native_dropout"} and not is_active_dropout(node)


# --- arguments ------------------------------------------------------------------------------------


def operand(node: fx.Node, position: int, *names: str, default: object = None) -> Any:
    """Return an argument of a call by its position or by one of its names."""
    if len(node.args) > position:
        return node.args[position]
    return next((node.kwargs[name] for name in names if name in node.kwargs), default)


def first_operand(node: fx.Node) -> Any:
    """Return what a call works on, by whichever name: input, self, tensor or tensors."""
    return operand(node, 0, "input", "self", "tensor", "tensors")


def first_two(node: fx.Node) -> tuple[Any, Any]:
    """Return the addends of an add, the factors of a product, however they were passed."""
    return first_operand(node), operand(node, 1, "other")


def leaves(value: Any) -> list[Any]:
    """Return what nested arguments hold, in order."""
    found: list[Any] = []
    fx.node.map_aggregate(value, found.append)
    return found


def nodes_in(argument: Any) -> list[fx.Node]:
    """Return the nodes in nested arguments, in order."""
    return [value for value in leaves(argument) if isinstance(value, fx.Node)]


# --- values ---------------------------------------------------------------------------------------


def value_of(node: fx.Node) -> Any:
    """Return what describes a node's value: a fake tensor, several, a number, None if unknown."""
    return node.meta.get("example_value", node.meta.get("val"))


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """Return the fake tensors that describe a node's value, which may be several."""
    value = value_of(node)
    values = value if isinstance(value, tuple | list) else (value,)
    return [v for v in values if isinstance(v, torch.Tensor)]


def tensor_meta(node: object) -> torch.Tensor | None:
    """Return the fake tensor that describes a node's value, or None for anything else."""
    value = value_of(node) if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def known_tensor(node: object) -> torch.Tensor:
    """Return the fake tensor of a node that is known to hold one."""
    value = tensor_meta(node)
    assert value is not None
    return value


def dtype_of(node: object) -> torch.dtype | None:
    """Return the dtype of a node's tensor value, None for anything else."""
    value = tensor_meta(node)
    return None if value is None else value.dtype


def known_dtype(node: object) -> torch.dtype:
    """Return the dtype of a node that is known to hold a tensor."""
    return known_tensor(node).dtype


def ndim_of(node: object) -> int:
    """Return the number of dims of a tensor, -1 for anything else."""
    value = tensor_meta(node)
    return -1 if value is None else value.ndim


def same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Compare sizes without adding a guard: symbols are equal where that is known already."""
    return len(a) == len(b) and all(
        statically_known_true(m == n) for m, n in zip(a, b, strict=True)
    )


def same_shape(a: object, b: object) -> bool:
    """Whether two nodes are tensors of one shape, as far as is known without a guard."""
    first, second = tensor_meta(a), tensor_meta(b)
    return first is not None and second is not None and same_sizes(first.shape, second.shape)


def is_float(value: torch.Tensor) -> bool:
    """Whether a tensor may have a gradient: floats and complex numbers."""
    return value.dtype.is_floating_point or value.dtype.is_complex


def may_hold_floats(node: fx.Node) -> bool:
    """Whether a node may carry a gradient: integers, masks and sizes depend on no stream."""
    value = value_of(node)
    if isinstance(value, torch.Tensor):
        return is_float(value)
    is_several = isinstance(value, tuple | list) and not isinstance(value, torch.Size)
    return is_several or value is None


def is_parameter(node: fx.Node) -> bool:
    """Return whether a node is a parameter that the graph takes as an input."""
    is_input = node.op in ("placeholder", "get_attr")
    return is_input and isinstance(tensor_meta(node), torch.nn.Parameter)


def is_activation_input(node: fx.Node) -> bool:
    """Return whether a node is a value of the model's that enters the graph: floats, no weights."""
    meta = tensor_meta(node)
    if node.op != "placeholder" or meta is None or is_parameter(node):
        return False
    return meta.dtype.is_floating_point and meta.ndim >= 2


def made_of_parameters(node: fx.Node, depth: int = 8) -> bool:
    """Return whether a node is a parameter or computed from parameters alone, in a few steps."""
    if is_parameter(node):
        return True
    if node.op in ("placeholder", "output") or depth == 0:
        return False
    inputs = node.all_input_nodes
    return bool(inputs) and all(made_of_parameters(n, depth - 1) for n in inputs)


_OF_A_MODULE = re.compile(r"L\['(_xtrain_model|self)'\]\.")


def is_table(node: fx.Node) -> bool:
    """Return whether a value holds no activation: angles, positions and decays of the model's own.

    Made of buffers, other tensors that a module keeps, integers and constants alone; an embedding
    reads a parameter, and is none.
    """
    return not any(
        is_parameter(n)
        or (is_activation_input(n) and not _OF_A_MODULE.match(torch_compat.source_name(n)))
        for n in reach([node])
    )


def reads_form_alone(node: fx.Node, source: fx.Node) -> bool:
    """Whether a node asks an operand for its form alone: zeros_like(x), x.new_ones(3)."""
    name = op_name(node)
    if name in FORM_OF_SECOND:
        return bool(node.args) and node.args[0] is not source
    return name.endswith("_like") or name.startswith("new_") or name == "size"


# How Dynamo spells a module that code takes from the __dict__ of the one that holds it.
_HELD_MODULE = re.compile(r"(?:\.__dict__\['_modules'\]|\._modules)\['([^']*)'\]")


def module_path(node: fx.Node) -> str:
    """Return the source name of the innermost module that a node was traced in, "" if unknown.

    A module that another hands out by __getattr__ (PEFT's) is spelt as one that it holds.
    """
    stack = node.meta.get("nn_module_stack")
    path = next(reversed(stack.values()))[0] if stack else ""
    return _HELD_MODULE.sub(r".\1", path)


def short_place(place: str) -> str:
    """Return a file's place as a reader knows it: from its package on, or from this folder."""
    return place.rpartition("site-packages/")[2].removeprefix(f"{Path.cwd()}/")


# --- ways -----------------------------------------------------------------------------------------


def reach(
    start: Iterable[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]] | None = None
) -> Iterator[fx.Node]:
    """Yield some nodes and all that steps lead to from them, each once, the nearest first.

    Args:     step: the nodes next to one; None: its operands.
    """
    found = dict.fromkeys(start)
    pending = list(found)
    for node in pending:
        yield node
        for near in node.all_input_nodes if step is None else step(node):
            if near not in found:
                found[near] = None
                pending.append(near)


def depends_on_contraction(node: fx.Node) -> bool:
    """Return whether a value comes from a product of matrices, however far back."""
    return any(map(holds_contraction, reach([node])))


# --- memory ---------------------------------------------------------------------------------------


def written_operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands that a call writes into, as far as its op says so itself."""
    target, written = node.target, []
    if not is_call(node):
        return []
    if isinstance(target, torch_compat.OpOverloadPacket) and len(target.overloads()) == 1:
        target = getattr(target, target.overloads()[0])
    if isinstance(target, torch_compat.OpOverload):
        for i, argument in enumerate(torch_compat.schema(target).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written += nodes_in(operand(node, i, argument.name))
        return written
    in_place = is_in_place(op_name(node))
    if callable(target) and (position := _place_of_inplace(target)) is not None:
        in_place |= operand(node, position, "inplace") is True
    if in_place or node.kwargs.get("inplace") is True:
        written += nodes_in(operand(node, 0, "input", "self"))
    return written + nodes_in(node.kwargs.get("out"))


@cache
def _place_of_inplace(target: Any) -> int | None:
    """Where a function takes its `inplace` argument, None if it has none."""
    try:
        names = list(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("inplace") if "inplace" in names else None


def base_of(node: fx.Node) -> fx.Node | None:
    """Return the tensor whose memory a node shows another view of."""
    is_view = op_name(node) in VIEW_LIKE | PART | {"select", "detach"}
    source = node.args[0] if is_view and node.args else None
    return source if isinstance(source, fx.Node) else None


# --- graphs and the bodies that they call ---------------------------------------------------------


def called_bodies(node: fx.Node) -> list[fx.GraphModule]:
    """Return every graph that a higher-order call may run, wherever it stands in the arguments."""
    if not isinstance(node.target, torch_compat.HigherOrderOperator):
        return []
    given = (_body(a) for a in node.all_input_nodes)
    return [body for body in given if body is not None]


def _body(node: object) -> fx.GraphModule | None:
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    found = _get_attribute(node.graph.owning_module, str(node.target))
    return found if isinstance(found, fx.GraphModule) else None


def _get_attribute(module: torch.nn.Module | None, path: str) -> torch.nn.Module | None:
    for part in path.split("."):
        module = getattr(module, part, None)
    return module


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """Return the inputs of a graph, in order."""
    return [n for n in graph.nodes if n.op == "placeholder"]


def output_of(graph: fx.Graph) -> fx.Node:
    """Return the node that a graph ends with."""
    return next(n for n in reversed(graph.nodes) if n.op == "output")


def body_operands(call: fx.Node) -> dict[fx.Node, Any]:
    """Return placeholder of the body -> operand for a call that runs one body once, else {}."""
    bodies = called_bodies(call) if op_name(call) in TRANSPARENT_CALLS else []
    if len(bodies) != 1:
        return {}
    position = next(
        i for i, a in enumerate(call.args) if isinstance(a, fx.Node) and a.op == "get_attr"
    )
    return dict(zip(placeholders(bodies[0].graph), call.args[position + 1 :], strict=False))


def operands_of_bodies(module: fx.GraphModule) -> dict[fx.Node, Any]:
    """Return placeholder of a called body -> operand, over a module and its bodies.

    A body that is called from several places has none: its operands are not one value.
    """
    found: dict[fx.Node, Any] = {}
    several: set[fx.Node] = set()
    for part in dict.fromkeys(walk_graphs(module)):
        for node in part.graph.nodes:
            given = body_operands(node)
            several.update(p for p in given if p in found)
            found |= given
    return {p: value for p, value in found.items() if p not in several}


def walk_graphs(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yield a graph module and every higher-order body below it, outermost first."""
    yield module
    for node in module.graph.nodes:
        if (body := _body(node)) is not None:
            yield from walk_graphs(body)


def clone_graph(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of Dynamo's graph module that passes may change, bodies included.

    Dynamo keeps the original for guards and for a second call of the backend, so it is never
    touched. Parameters and constants are shared, and what AOTAutograd looks up is carried over:
    node meta, the source of each placeholder, and Dynamo's marks and meta of the module.
    """
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(module.graph, mapping)
    result = fx.GraphModule(module, graph, class_name=type(module).__name__)
    source_output = output_of(module.graph)
    new_output = graph.output(output, getattr(source_output, "type", None))
    new_output.meta = dict(source_output.meta)
    for old, new in mapping.items():
        torch_compat.copy_source(old, new)
        if (body := _body(old)) is not None:
            setattr(result, str(old.target), clone_graph(body))
    result.meta = dict(module.meta)
    torch_compat.copy_marks(module, result)
    result.recompile()
    return result


# --- new nodes ------------------------------------------------------------------------------------


class Refused(Exception):
    """A match that stays as it is; the message is the reason that the report gives."""


# What a node that takes another's place says of where it came from.
_INHERITED = ("nn_module_stack", "stack_trace", "source_fn_stack", "custom")


def values_of(arguments: Any) -> Any:
    """Return arguments with each node replaced by the fake value that describes it."""
    return fx.node.map_arg(arguments, value_of)


def emit(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node, **kwargs: Any
) -> fx.Node:
    """Return a new node at the graph's insertion point that calls `target`, its value described.

    Args:     like: the node whose place it takes, for its module path and source line.
    Raises:   Refused if the op does not take these operands.
    """
    node = graph.call_function(target, args, kwargs)
    node.meta = {key: like.meta[key] for key in _INHERITED if key in like.meta}
    try:
        with torch.no_grad():
            node.meta["example_value"] = target(*values_of(args), **values_of(kwargs))
    except (ValueError, TypeError, RuntimeError) as error:
        graph.erase_node(node)
        reason = str(error).strip().partition("\n")[0]
        raise Refused(f"{target} does not take it: {reason}") from error
    return node


def erase_unread(nodes: Iterable[fx.Node]) -> None:
    """Erase those of these nodes that nothing reads, users first."""
    pending = set(nodes)
    while dead := [n for n in pending if not n.users]:
        for node in dead:
            pending.discard(node)
            if is_call(node):
                node.graph.erase_node(node)


# What only makes a value: it may go when nobody reads it.
_PURE = VIEW_LIKE | SHOWN | MUL | ADD | SUB | NEG | STACK | {"repeat_interleave"}


def erase_dead(node: fx.Node) -> None:
    """Erase a node that nothing reads, then what only it read: arithmetic and views."""
    pending = [node]
    while pending:
        dead = pending.pop()
        name = "" if torch_compat.is_erased(dead) or dead.users else op_name(dead)
        if name in _PURE and not is_in_place(name):
            pending += dead.all_input_nodes
            dead.graph.erase_node(dead)
