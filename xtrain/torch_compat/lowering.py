"""Lowering an op by its decomposition, inside inductor alone.

inductor's own decomposition table is applied by AOTAutograd, before the graph is cut into forward
and backward: an op in that table is gone by then, and the partitioner may keep its intermediates
(a dropout mask). A lowering runs after the cut, so forward and backward ops stay single nodes
until nothing can be saved any more, and are fused with their neighbours all the same.

A call that says opaque=True stays a call of the op: the same lowering hands it to inductor as an
external kernel, which the wrapper calls between its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from xtrain.torch_compat.backends import any_on_cuda

OPAQUE = "opaque"  # last argument of an op that has both forms

# module, expression, expression where all but addresses is fixed
_direct_calls: dict[torch._ops.OpOverload, tuple[str, str, Callable[[str], str]]] = {}
_pending_lowerings: dict[torch._ops.OpOverload, Callable[..., Any]] = {}


def lower_by_decomposition(op: torch._ops.OpOverload, decomposition: Callable[..., Any]) -> None:
    """Have inductor compile op as the plain torch function `decomposition` of the same arguments.

    The lowering is registered at the first compile: `flush_lowerings` is called by the op's fake
    implementation, which every compile runs and which finds inductor loaded by then.
    """
    _pending_lowerings[op] = decomposition
    flush_lowerings()


def position_of_opaque(op: torch._ops.OpOverload) -> int | None:
    """Return where op's schema has its last argument `opaque`, or None if it has none."""
    arguments = op._schema.arguments
    last = len(arguments) - 1
    return last if arguments and arguments[last].name == OPAQUE else None


def says_opaque(node: torch.fx.Node) -> bool:
    """Whether a call of an op that has both forms asks for its kernel."""
    position = position_of_opaque(node.target)  # type: ignore[arg-type]
    if position is None:
        return False
    positional = node.args[position] if len(node.args) > position else False
    return bool(node.kwargs.get(OPAQUE, positional))


def flush_lowerings() -> None:
    """Register the lowerings still waiting, once inductor has been imported by somebody."""
    if not _pending_lowerings or not hasattr(
        sys.modules.get("torch._inductor.lowering"), "register_lowering"
    ):
        return
    from torch._inductor.lowering import register_lowering

    while _pending_lowerings:
        op, decomposition = _pending_lowerings.popitem()
        register_lowering(op, type_promotion_kind=None)(_decomposed_lowering(decomposition))


def _decomposed_lowering(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    def lowering(*args: Any, **kwargs: Any) -> Any:
        from torch._inductor.virtualized import V

        node = V.graph.current_node
        if says_opaque(node):
            return _external_call(node, args, kwargs)
        flat_nodes, spec = pytree.tree_flatten((node.args, node.kwargs))
        flat_args = pytree.tree_leaves((list(args), kwargs))
        inputs = [i for i, leaf in enumerate(flat_nodes) if isinstance(leaf, torch.fx.Node)]

        def call(*values: Any) -> Any:
            leaves = list(flat_nodes)
            for i, value in zip(inputs, values, strict=True):
                leaves[i] = value
            call_args, call_kwargs = pytree.tree_unflatten(leaves, spec)
            return decomposition(*call_args, **call_kwargs)

        graph_module = _trace(call, [flat_nodes[i].meta["val"] for i in inputs])
        return _lower_graph(graph_module, [flat_args[i] for i in inputs])

    return lowering


def call_in_inductors_code(
    op: torch._ops.OpOverload, module: str, expression: str, fixed: Callable[[str], str]
) -> None:
    """Have inductor's code call module.expression for an opaque op on a GPU, not the op.

    What is called takes the op's arguments and returns what its kernel does; the code holds no
    autograd, no dispatch and no other device there that the op's call would have to see to. Where
    shapes and strides are numbers it is module.fixed(text): calls with the same text differ in
    nothing but their tensors' addresses.
    """
    _direct_calls[op] = (module, expression, fixed)


def _external_call(node: torch.fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Lower node to a call of its op, its inputs laid out as they were traced.

    Inductor may otherwise pick other strides for an intermediate, which a kernel would copy.
    """
    from torch._inductor.ir import IRNode, TensorBox
    from torch._inductor.lowering import constrain_to_fx_strides, fallback_handler

    args, kwargs = constrain_to_fx_strides(node, *args, **kwargs)
    if not _calls_directly(node):
        return fallback_handler(node.target, add_to_fallback_set=False)(*args, **kwargs)
    outputs = _direct_call_class().create(node.target, *args, **kwargs)
    return pytree.tree_map_only(IRNode, TensorBox.create, outputs)


def _calls_directly(node: torch.fx.Node) -> bool:
    """Whether inductor's code is Python here and has something better to call than node's op."""
    from torch._inductor.virtualized import V

    if node.target not in _direct_calls or V.graph.cpp_wrapper:
        return False
    return any_on_cuda(pytree.tree_leaves(node.meta["val"]))


@cache
def _direct_call_class() -> Any:
    from torch._inductor.ir import FallbackKernel

    class DirectCall(FallbackKernel):
        """The call of an op by another name: inductor knows it as before, its code says less."""

        def codegen(self, wrapper: Any) -> None:
            module, expression, fixed = _direct_calls[self.op_overload]  # type: ignore[index]
            text = _what_is_fixed(*self.unflatten_args(self.inputs, self.constant_args))
            if text is not None:
                expression = fixed(text)
            root = wrapper  # of a graph cut in pieces the whole alone has imports
            while getattr(root, "parent_wrapper", None) is not None:
                root = root.parent_wrapper
            root.add_import_once(f"import {module}")
            self.python_kernel_name = f"{module}.{expression}"
            super().codegen(wrapper)

    return DirectCall


def _what_is_fixed(args: Any, kwargs: dict[str, Any]) -> str | None:
    """Return all that inductor knows of a call's arguments, None where a size is not a number."""
    import sympy
    from torch._inductor.ir import IRNode

    parts = []
    for leaf in pytree.tree_leaves((list(args), kwargs)):
        if isinstance(leaf, IRNode):
            sizes = [*leaf.get_size(), *leaf.get_stride()]
            if not all(isinstance(size, int | sympy.Integer) for size in sizes):
                return None
            shape, stride = sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :]
            parts.append(f"{leaf.get_dtype()}{shape}{stride}{leaf.get_device()}")
        elif isinstance(leaf, sympy.Expr | torch.SymInt | torch.SymFloat | torch.SymBool):
            return None
        else:
            parts.append(repr(leaf))
    return " ".join([*parts, *kwargs])


def _trace(function: Callable[..., Any], fake_inputs: list[Any]) -> torch.fx.GraphModule:
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    with V.fake_mode, torch.no_grad():
        return make_fx(function, decomposition_table=select_decomp_table())(*fake_inputs)


def _lower_graph(graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """Lower each node of a traced graph in place, as inductor does for the body of a subgraph."""
    from torch._inductor.virtualized import V

    env = V.graph.env
    remaining = iter(inputs)
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(remaining)
        elif node.op == "output":
            return torch.fx.node.map_arg(node.args[0], env.__getitem__)
        elif node.op == "call_function":
            env[node] = V.graph.run_node(node)
        else:
            raise RuntimeError(
                f"the decomposition of an xtrain op holds a {node.op} node ({node.target}): "
                "build constants from Python numbers (torch.full), not from tensors"
            )
    raise RuntimeError("the decomposition of an xtrain op has no output node")
