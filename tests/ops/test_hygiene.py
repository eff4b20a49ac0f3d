"""No op changes its inputs or the gradients that come in (row C20 of the tracker cases)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples import SAMPLES, maker, wanting_gradients, with_gradients
from torch import Tensor
from torch.utils import _pytree as pytree

from xtrain.ops import OPS


def bits(value: Any) -> bytes | Any:
    if not isinstance(value, Tensor):
        return value
    packed = torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())
    return packed.flatten().view(torch.uint8).numpy().tobytes()


def snapshot(tree: Any) -> list[Any]:
    return [bits(leaf) for leaf in pytree.tree_leaves(tree)]


def grad_layouts(output: Tensor) -> dict[str, Tensor]:
    """Incoming gradients that a careless kernel misreads or writes through."""
    dy = torch.randn(output.shape).to(output.dtype)
    layouts = {
        "dense": dy,
        "expanded": torch.ones((1,) * output.dim(), dtype=dy.dtype).expand_as(dy),
    }
    if output.dim() >= 2:
        layouts["transposed"] = dy.transpose(0, -1).contiguous().transpose(0, -1)
    return layouts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_inputs_and_gradients_unchanged(name, dtype):
    for args in SAMPLES[name](maker("contiguous", dtype)):
        args = with_gradients(name, args)
        leaves = wanting_gradients(args)
        before = snapshot(args)
        outputs = [t for t in pytree.tree_leaves(OPS[name].forward(*args)) if t.requires_grad]
        after_forward = snapshot(outputs)
        for layout in grad_layouts(outputs[0]):
            grads = [grad_layouts(t).get(layout, torch.ones_like(t)) for t in outputs]
            grads_before = snapshot(grads)
            first = torch.autograd.grad(outputs, leaves, grads, retain_graph=True)
            first_bits = snapshot(first)
            again = torch.autograd.grad(outputs, leaves, grads, retain_graph=True)
            assert snapshot(grads) == grads_before, f"{name} wrote into a {layout} gradient"
            assert snapshot(again) == first_bits, f"{name}: second backward differs ({layout})"
            dense = [g.contiguous() for g in grads]
            plain = torch.autograd.grad(outputs, leaves, dense, retain_graph=True)
            assert snapshot(plain) == first_bits, f"{name}: a {layout} gradient is misread"
        assert snapshot(args) == before, f"{name} changed an input"
        assert snapshot(outputs) == after_forward, f"{name}: backward changed its output"


@pytest.mark.parametrize("name", OPS)
def test_results_are_fresh_memory(name):
    for args in SAMPLES[name](maker("contiguous", torch.float32)):
        storages = {
            t.untyped_storage().data_ptr()
            for t in pytree.tree_leaves(args)
            if isinstance(t, Tensor) and t.numel()
        }
        for out in pytree.tree_leaves(OPS[name].forward(*args)):
            if isinstance(out, Tensor) and out.numel():
                assert out.untyped_storage().data_ptr() not in storages, f"{name} aliases an input"


@pytest.mark.parametrize("name", OPS)
def test_second_derivative_is_right_or_refused(name):
    args = next(iter(SAMPLES[name](maker("contiguous", torch.float32))))
    args = with_gradients(name, args)
    leaves = wanting_gradients(args)
    outputs = [t for t in pytree.tree_leaves(OPS[name].forward(*args)) if t.requires_grad]
    grads = torch.autograd.grad([t.sum() for t in outputs], leaves, create_graph=True)
    total = sum((g * g).sum() for g in grads)
    if not total.requires_grad:
        return  # linear: the gradient depends on no input
    with pytest.raises(NotImplementedError, match=f"xtrain::{name}_backward has no derivative"):
        torch.autograd.grad(total, leaves)
