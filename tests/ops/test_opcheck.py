"""What holds of every op: opcheck, exact strides, inputs and gradients left alone, fresh memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples import DTYPES, LAYOUTS, SAMPLES, maker, wanting_gradients, with_gradients
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from xtrain.ops import OPS


class RecordCalls(TorchDispatchMode):
    """Keeps the arguments of each call of one op."""

    def __init__(self, op: torch._ops.OpOverload) -> None:
        super().__init__()
        self.op = op
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is self.op:
            self.calls.append(pytree.tree_map_only(Tensor, Tensor.detach, args))
        return func(*args, **(kwargs or {}))


def backward_arguments(name: str, args: tuple[Any, ...], make) -> list[tuple[Any, ...]]:
    """What backward of this forward call hands to the backward op, with gradients in the layout."""
    args = with_gradients(name, args)
    outputs = [t for t in pytree.tree_leaves(OPS[name].forward(*args)) if t.requires_grad]
    grads = [make(*t.shape).to(t.dtype) if t.dim() else torch.ones_like(t) for t in outputs]
    with RecordCalls(OPS[name].backward) as record:
        torch.autograd.backward(outputs, grads)
    assert record.calls, f"backward of {name} did not call {OPS[name].backward}"
    return record.calls


def assert_fake_equals_real(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> None:
    real = pytree.tree_leaves(op(*args))
    with FakeTensorMode() as mode:
        fake_args = pytree.tree_map_only(Tensor, mode.from_tensor, args)
        fake = pytree.tree_leaves(op(*fake_args))
    for r, f in zip(real, fake, strict=True):
        if not isinstance(r, Tensor):
            assert r == f
            continue
        assert (f.shape, f.stride(), f.dtype) == (r.shape, r.stride(), r.dtype), op
        assert f.storage_offset() == r.storage_offset()


def test_every_op_has_samples():
    assert set(SAMPLES) == set(OPS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPS)
def test_fake_strides_equal_real(name, layout, dtype):
    make = maker(layout, dtype)
    for args in SAMPLES[name](make):
        assert_fake_equals_real(OPS[name].forward, args)
        for call in backward_arguments(name, args, make):
            assert_fake_equals_real(OPS[name].backward, call)


# Layouts and dtypes take ways of their own through an op, their pairs do not: what a pair could
# change, shape, strides and dtype of the results, test_fake_strides_equal_real asks of each.
WAYS = [(layout, torch.float32) for layout in LAYOUTS]
WAYS += [("contiguous", dtype) for dtype in DTYPES[1:]]


@pytest.mark.parametrize(("layout", "dtype"), WAYS, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_opcheck(name, layout, dtype):
    """Each way on the first sample; the other samples where fp32 is not strided."""
    make = maker(layout, dtype)
    samples = list(SAMPLES[name](make))
    for args in samples if (layout, dtype) == WAYS[0] else samples[:1]:
        torch.library.opcheck(OPS[name].forward, with_gradients(name, args))
        for call in backward_arguments(name, args, make):
            torch.library.opcheck(OPS[name].backward, call)


# --- inputs, gradients and results are left alone -------------------------------------------------


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
