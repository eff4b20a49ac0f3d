"""Hand a backward kernel the gradients of each user of its output, instead of their sum.

Before:  g = a + b + c
         xtrain.dropout_add_rms_norm_backward(h, weight, grad_h, [g], ..., opaque=True)
After:   xtrain.dropout_add_rms_norm_backward(h, weight, grad_h, [a, b, c], ..., opaque=True)
Stage:   backward graph that inductor is about to lower.
Changes numerics: the sum is formed in fp32 instead of in the users' dtype, rounded once less.
Needs:   sums of one shape and dtype that nothing else reads. Three linears read a norm's output
         (query, key, value), and autograd adds their gradients in a kernel of its own: 8 bytes an
         element, where the whole backward kernel moves 16.
Skips:   see-through calls, whose sums inductor fuses anyway.
"""

from __future__ import annotations

import torch
from torch import fx

from xtrain import torch_compat
from xtrain.ops import OPS
from xtrain.ops.dropout_add_rms_norm.op import KERNEL_GRADS
from xtrain.passes.run import PassResult

BACKWARD = OPS["dropout_add_rms_norm"].backward
_GRAD_Y = [argument.name for argument in torch_compat.schema(BACKWARD).arguments].index("grad_y")


def split_gradient_sums(graph: fx.Graph) -> PassResult:
    """Split the sums that reach dropout_add_rms_norm_backward; counts calls, and those changed."""
    result = PassResult()
    for node in graph.find_nodes(op="call_function", target=BACKWARD):
        result.num_matched += 1
        if not torch_compat.says_opaque(node):
            result.skip("inductor sees through the call and fuses its sum")
            continue
        grads = list(node.args[_GRAD_Y])
        sums: list[fx.Node] = []
        while len(grads) < KERNEL_GRADS and (found := next(filter(_is_sum, grads), None)):
            position = grads.index(found)
            grads[position : position + 1] = found.args[:2]
            sums.append(found)
        if sums:
            node.update_arg(_GRAD_Y, grads)
            result.num_replaced += 1
        else:
            result.skip("its gradient is no sum that nothing else reads")
        for summed in sums:  # from the outermost: each was read by the one before alone
            graph.erase_node(summed)
    return result


def _is_sum(node: object) -> bool:
    """Whether a node adds two tensors like itself, for one reader."""
    if not isinstance(node, fx.Node) or node.target is not torch.ops.aten.add.Tensor:
        return False
    if len(node.users) != 1 or node.kwargs or len(node.args) != 2:
        return False
    values = [a.meta.get("val") if isinstance(a, fx.Node) else None for a in (node, *node.args)]
    if not all(isinstance(value, torch.Tensor) for value in values):
        return False
    total, *addends = values
    return all((v.shape, v.dtype) == (total.shape, total.dtype) for v in addends)  # type: ignore
