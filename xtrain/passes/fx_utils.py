"""Small helpers on FX graphs that every pass shares.

They work on Dynamo's own graph (torch functions, tensor methods, higher-order bodies) and on
normalised aten graphs alike: an op is recognised by its name, whatever spelling reached the graph.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from xtrain import torch_compat

# Names that a tensor op can have in a Dynamo graph or an aten graph, by what it does.
ADD = frozenset({"add", "add_", "iadd", "__add__", "__iadd__", "__radd__"})
IN_PLACE_ADD = frozenset({"add_", "iadd", "__iadd__"})
MUL = frozenset({"mul", "mul_", "imul", "multiply", "__mul__", "__rmul__"})
DIV = frozenset({"div", "div_", "truediv", "itruediv", "divide", "true_divide", "__truediv__"})
DROPOUT = frozenset(
    "dropout dropout_ native_dropout dropout1d dropout2d dropout3d feature_dropout "
    "feature_dropout_ alpha_dropout alpha_dropout_ feature_alpha_dropout feature_alpha_dropout_"
    "".split()
)
IN_PLACE_SCALING = frozenset({"mul_", "imul", "__imul__", "div_", "itruediv", "__itruediv__"})
# One value seen in another form: what a residual operand may pass through on its way to the add.
VIEW_LIKE = frozenset(
    {
        "to",
        "_to_copy",
        "type",
        "type_as",
        "float",
        "half",
        "bfloat16",
        "double",
        "view",
        "reshape",
        "_unsafe_view",
        "view_as",
        "reshape_as",
        "contiguous",
        "clone",
        "alias",
        "flatten",
        "unflatten",
        "squeeze",
        "unsqueeze",
        "transpose",
        "swapaxes",
        "swapdims",
        "permute",
        "movedim",
        "moveaxis",
        "t",
        "mT",  # as Dynamo spells x.mT and x.T from torch 2.14 on; getattr before
        "numpy_T",
        "convert_element_type",
    }
)
CONTRACTION = frozenset(
    {
        "linear",
        "matmul",
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "addbmm",
        "einsum",
        "tensordot",
        "inner",
        "bilinear",
        "conv1d",
        "conv2d",
        "conv3d",
        "convolution",
        "grouped_mm",
        "_grouped_mm",
        "scaled_mm",
        "_scaled_mm",
        "scaled_grouped_mm",
        "_scaled_grouped_mm",
        "scaled_dot_product_attention",
        "flex_attention",
        "multi_head_attention_forward",
        "_native_multi_head_attention",
        "_transformer_encoder_layer_fwd",
    }
)
# Where a convolution takes its number of groups.
_GROUPS_OF_CONVOLUTION = {"conv1d": 6, "conv2d": 6, "conv3d": 6, "convolution": 8}
ATTENTION = frozenset(
    {
        "scaled_dot_product_attention",
        "flex_attention",
        "multi_head_attention_forward",
        "_native_multi_head_attention",
    }
)
SOFTMAX = frozenset({"softmax", "_softmax", "_safe_softmax"})

# Higher-order calls that run one body once, its operands behind it in the arguments.
TRANSPARENT_CALLS = frozenset(
    {"tag_activation_checkpoint", "wrap", "wrap_activation_checkpoint", "wrap_with_autocast"}
)

# How Dynamo spells a module that code takes from the __dict__ of the one that holds it.
_HELD_MODULE = re.compile(r"(?:\.__dict__\['_modules'\]|\._modules)\['([^']*)'\]")

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


def is_library_op(target: object) -> bool:
    """Whether an op is neither torch's nor ours, so that its name does not say what it does."""
    if not isinstance(target, torch_compat.OpOverload | torch_compat.OpOverloadPacket):
        return False
    name = getattr(target, "namespace", "") or str(target).partition(".")[0]
    return name not in _KNOWN_LIBRARIES


_KNOWN_LIBRARIES = frozenset({"aten", "prims", "xtrain", "torch_attn", "_c10d_functional"})


def operand(node: fx.Node, position: int, *names: str, default: object = None) -> Any:
    """Return an argument of a call by its position or by one of its names."""
    if len(node.args) > position:
        return node.args[position]
    return next((node.kwargs[name] for name in names if name in node.kwargs), default)


def add_operands(node: fx.Node) -> tuple[Any, Any]:
    """Return the two addends of an add, however they were passed."""
    return operand(node, 0, "input", "self"), operand(node, 1, "other")


def written_operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands that a call writes into, as far as its op says so itself."""
    target, written = node.target, []
    if node.op not in ("call_function", "call_method"):
        return []
    if isinstance(target, torch_compat.OpOverloadPacket) and len(target.overloads()) == 1:
        target = getattr(target, target.overloads()[0])
    if isinstance(target, torch_compat.OpOverload):
        for i, argument in enumerate(torch_compat.schema(target).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written += _nodes(operand(node, i, argument.name))
        return written
    name = op_name(node)
    in_place = name.removeprefix("__").removesuffix("__") in _IN_PLACE
    in_place |= name.endswith("_") and not name.endswith("__")
    if callable(target) and (position := _place_of_inplace(target)) is not None:
        in_place |= operand(node, position, "inplace") is True
    if in_place or node.kwargs.get("inplace") is True:
        written += _nodes(operand(node, 0, "input", "self"))
    return written + _nodes(node.kwargs.get("out"))


_IN_PLACE = frozenset({"setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "ipow", "imod"})
_IN_PLACE |= {"iand", "ior", "ixor", "imatmul", "ilshift", "irshift"}


@cache
def _place_of_inplace(target: Any) -> int | None:
    """Where a function takes its `inplace` argument, None if it has none."""
    try:
        names = list(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("inplace") if "inplace" in names else None


def _nodes(argument: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(argument, found.append)
    return found


def tensor_meta(node: object) -> torch.Tensor | None:
    """Return the fake tensor that describes a node's value, or None for anything else."""
    if not isinstance(node, fx.Node):
        return None
    value = node.meta.get("example_value", node.meta.get("val"))
    return value if isinstance(value, torch.Tensor) else None


def called_bodies(node: fx.Node) -> list[fx.GraphModule]:
    """Return every graph that a higher-order call may run, wherever it stands in the arguments."""
    bodies = []
    if isinstance(node.target, torch_compat.HigherOrderOperator):
        for argument in node.all_input_nodes:
            if argument.op == "get_attr":
                body = _get_attribute(node.graph.owning_module, str(argument.target))
                if isinstance(body, fx.GraphModule):
                    bodies.append(body)
    return bodies


def body_operands(call: fx.Node) -> dict[fx.Node, Any]:
    """Return placeholder of the body -> operand for a call that runs one body once, else {}."""
    if op_name(call) not in TRANSPARENT_CALLS:
        return {}
    bodies = called_bodies(call)
    if len(bodies) != 1:
        return {}
    placeholders = [n for n in bodies[0].graph.nodes if n.op == "placeholder"]
    return dict(zip(placeholders, call.args[_body_position(call) + 1 :], strict=False))


def operands_of_bodies(module: fx.GraphModule) -> dict[fx.Node, Any]:
    """Return placeholder of a called body -> operand, over a module and its bodies.

    A body that is called from several places has none: its operands are not one value.
    """
    found: dict[fx.Node, Any] = {}
    several = set()
    for part in dict.fromkeys(walk_graphs(module)):
        for node in part.graph.nodes:
            for placeholder, value in body_operands(node).items():
                if placeholder in found:
                    several.add(placeholder)
                found[placeholder] = value
    return {p: value for p, value in found.items() if p not in several}


def _body_position(call: fx.Node) -> int:
    return next(i for i, a in enumerate(call.args) if isinstance(a, fx.Node) and a.op == "get_attr")


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
    name = op_name(node)
    if name not in _GROUPS_OF_CONVOLUTION:
        return False
    weight = tensor_meta(operand(node, 1, "weight"))
    groups = operand(node, _GROUPS_OF_CONVOLUTION[name], "groups", default=1)
    return weight is not None and weight.shape[1] == 1 and groups != 1


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


def walk_graphs(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yield a graph module and every higher-order body below it, outermost first."""
    yield module
    for node in module.graph.nodes:
        if node.op == "get_attr":
            body = _get_attribute(module, str(node.target))
            if isinstance(body, fx.GraphModule):
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
    source_output = next(n for n in reversed(module.graph.nodes) if n.op == "output")
    new_output = graph.output(output, getattr(source_output, "type", None))
    new_output.meta = dict(source_output.meta)
    for old, new in mapping.items():
        torch_compat.copy_source(old, new)
        if old.op == "get_attr":
            body = _get_attribute(module, str(old.target))
            if isinstance(body, fx.GraphModule):
                setattr(result, str(old.target), clone_graph(body))
    result.meta = dict(module.meta)
    torch_compat.copy_marks(module, result)
    result.recompile()
    return result


def _get_attribute(module: torch.nn.Module | None, path: str) -> torch.nn.Module | None:
    for part in path.split("."):
        module = getattr(module, part, None)
    return module
