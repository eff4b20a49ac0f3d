"""What holds of every op: opcheck, strides and values in any layout, inputs and gradients left
alone, fresh memory, what is saved, one node in a graph, errors from a compile too; and of
every kernel that a CPU can interpret.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreter import (  # noqa: F401
    bf16_rounds_to_nearest,
    loop_bounds_are_scalars,
    run_interpreted,
)
from samples import (
    DTYPES,
    LAYOUTS,
    SAMPLES,
    SAVED,
    maker,
    wanting_gradients,
    with_gradients,
)
from tolerances import TOLERANCES
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from xtrain.ops import OPS
from xtrain.ops.launch import CALLS


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


@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("name", OPS)
def test_values_do_not_depend_on_the_layout(name, layout, device):
    """Results and gradients are those of contiguous copies, of gradients in the layout too."""
    make = maker(layout, torch.float32, str(device))
    for args in SAMPLES[name](make):
        args = pytree.tree_map_only(Tensor, lambda t: t.to(device), args)
        copies = pytree.tree_map_only(Tensor, torch.Tensor.contiguous, args)
        dys: list[Tensor] = []
        found = []
        for given in (args, copies):
            given = with_gradients(name, given)
            outs = pytree.tree_leaves(OPS[name].forward(*given))
            wanted = [t for t in outs if t.requires_grad]
            if not dys:
                dys = [make(*t.shape) if t.dim() else torch.ones_like(t) for t in wanted]
                dys = [dy.to(t.dtype) for dy, t in zip(dys, wanted, strict=True)]
            leaves = wanting_gradients(given)
            if name == "cross_entropy":  # a token that counts for nothing has no lse that is read
                outs[1] = outs[1].masked_fill(given[1] == given[3], 0.0)
            found.append([*outs, *torch.autograd.grad(wanted, leaves, dys)])
            dys = [dy.contiguous() for dy in dys]
        for result, expected in zip(*found, strict=True):
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


# Layouts and dtypes take ways of their own through an op, their pairs do not: what a pair could
# change, shape, strides and dtype of the results, test_fake_strides_equal_real asks of each. What
# else changes with the layout are guards on strides that are symbols.
WAYS = [(layout, torch.float32) for layout in LAYOUTS] + [("contiguous", torch.bfloat16)]


@pytest.mark.parametrize(("layout", "dtype"), WAYS, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_opcheck(name, layout, dtype):
    """All of it on all samples where fp32 is not strided; else the first, of symbolic sizes."""
    make = maker(layout, dtype)
    samples = list(SAMPLES[name](make))
    plain = (layout, dtype) == WAYS[0]
    checks = {} if plain else {"test_utils": ["test_schema", "test_aot_dispatch_dynamic"]}
    for args in samples if plain else samples[:1]:
        torch.library.opcheck(OPS[name].forward, with_gradients(name, args), **checks)
        for call in backward_arguments(name, args, make):
            torch.library.opcheck(OPS[name].backward, call, **checks)


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
    args = first_sample(name, torch.float32)
    leaves = wanting_gradients(args)
    outputs = [t for t in pytree.tree_leaves(OPS[name].forward(*args)) if t.requires_grad]
    grads = torch.autograd.grad([t.sum() for t in outputs], leaves, create_graph=True)
    total = sum((g * g).sum() for g in grads)
    if not total.requires_grad:
        return  # linear: the gradient depends on no input
    with pytest.raises(NotImplementedError, match=f"xtrain::{name}_backward has no derivative"):
        torch.autograd.grad(total, leaves)


# --- what is saved, what a compiler sees ----------------------------------------------------------


def first_sample(name: str, dtype: torch.dtype, device="cpu") -> tuple[Any, ...]:
    """With gradients, where the op gives them."""
    args = next(iter(SAMPLES[name](maker("contiguous", dtype, str(device)))))
    return with_gradients(name, pytree.tree_map_only(Tensor, lambda t: t.to(device), args))


def kept(name: str, args: tuple[Any, ...], outputs: list[Tensor]) -> list[Tensor]:
    """The arguments and results, past single numbers, that backward is to find again."""
    inputs, results = SAVED[name]
    values = [args[place] for place in inputs] + [outputs[place] for place in results]
    return [t for t in values if isinstance(t, Tensor) and t.dim() > 0]


@pytest.mark.parametrize("name", OPS)
def test_saves_no_mask_no_scores_no_statistics(name, device):
    """Of tensors those of SAVED alone: inputs, and results that the caller holds anyway."""
    args = first_sample(name, torch.float32, device)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        outputs = pytree.tree_leaves(OPS[name].forward(*args))
    expected = kept(name, args, outputs)
    assert {t.data_ptr() for t in saved if t.dim()} == {t.data_ptr() for t in expected}


def partitioned_graphs(function, *args, budget: float = 1.0) -> list[torch.fx.GraphModule]:
    """The forward and backward graphs as AOTAutograd hands them to a compiler."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[torch.fx.GraphModule] = []

    def keep(graph_module, _):
        graphs.append(graph_module)
        return make_boxed_func(graph_module.forward)

    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )
    with torch._functorch.config.patch(activation_memory_budget=budget):
        torch.compile(function, backend=backend, fullgraph=True)(*args).sum().backward()
    return graphs


@pytest.mark.parametrize("name", OPS)
def test_one_node_each_way_and_what_is_saved(name):
    """AOTAutograd keeps both ops whole, and hands to the backward what eager would save."""
    op = OPS[name]
    args = first_sample(name, torch.float32)

    def function(first: Tensor, *rest: Any) -> Tensor:
        results = pytree.tree_leaves(op.forward(first * 2, *rest))
        return sum(t.sin().sum() for t in results[:num_results])

    outputs = pytree.tree_leaves(op.forward(*args))
    num_results = sum(t.requires_grad for t in outputs)
    forward, backward = partitioned_graphs(function, *args)
    assert [n.target for n in forward.graph.nodes].count(op.forward) == 1
    assert [n.target for n in backward.graph.nodes].count(op.backward) == 1
    assert op.forward not in [n.target for n in backward.graph.nodes]
    given = [n.meta["val"] for n in backward.graph.nodes if n.op == "placeholder"]
    # sin's own derivative needs its argument
    expected = [*kept(name, args, outputs), *(t for t in outputs[:num_results] if t.dim())]
    most = sum(t.numel() for t in {id(t): t for t in expected}.values())
    assert sum(t.numel() for t in given if t.dim()) <= most


WRONG = {
    "dropout": lambda x: (x, 1.5, 1),
    "dropout_add_rms_norm": lambda x: (x, x, torch.ones(5), 0.1, 1),
    "rms_norm": lambda x: (x, torch.ones(5)),
    "rope": lambda x: (x, torch.ones(3, 4), torch.ones(3, 4)),
    "rope_qk": lambda x: (x, x, torch.ones(3, 4), torch.ones(3, 4)),
    "swiglu": lambda x: (x, torch.ones(2, 1)),
    "swiglu_packed": lambda x: (x[:, :3],),
    "geglu": lambda x: (x, torch.ones(2, 1)),
    "geglu_packed": lambda x: (x[:, :3],),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_value_errors_of_a_compile_too(name):
    """Which errors: see the tests of each op."""
    function = torch.compile(OPS[name].public, backend="eager", fullgraph=True)
    with pytest.raises(ValueError, match=r"\w: .*got .*"):
        function(*WRONG[name](torch.ones(2, 4)))


@pytest.mark.parametrize("name", ["rms_norm", "dropout_add_rms_norm"])
def test_opaque_calls_are_the_op_in_compiled_code(name, device):
    """opaque=True keeps the op's own kernel, forward and backward, to the bit."""
    args = first_sample(name, torch.bfloat16, device)

    def function(*args: Any) -> list[Tensor]:
        return pytree.tree_leaves(OPS[name].forward(*args, opaque=True))

    def with_grads(function) -> list[Tensor]:
        outs = function(*args)
        dys = [torch.ones_like(t) for t in outs]
        return [*outs, *torch.autograd.grad(outs, wanting_gradients(args), dys)]

    compiled = torch.compile(function, fullgraph=True)
    for found, expected in zip(with_grads(compiled), with_grads(function), strict=True):
        assert torch.equal(found, expected)


# --- kernels that a CPU can interpret -------------------------------------------------------------


def test_under_the_interpreter():
    run_interpreted(__file__)


# attention and losses ask where their tensors are: their kernels have tests of their own
INTERPRETED = [name for name in OPS if name in CALLS and "sdpa" not in name and "cross" not in name]


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [*((layout, torch.float32) for layout in LAYOUTS), ("contiguous", torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("name", INTERPRETED)
def interpreted_kernels_equal_the_op(name, layout, dtype):
    make = maker(layout, dtype)
    for args in SAMPLES[name](make):
        calls = [(OPS[name].forward, args)]
        calls += [(OPS[name].backward, call) for call in backward_arguments(name, args, make)]
        for op, given in calls:
            before = snapshot(given)
            results = pytree.tree_leaves(CALLS[op._opname]._implementation(*given))
            assert snapshot(given) == before
            for result, expected in zip(results, pytree.tree_leaves(op(*given)), strict=True):
                assert (result.dtype, result.stride()) == (expected.dtype, expected.stride())
                rtol, atol = TOLERANCES[result.dtype]
                torch.testing.assert_close(result, expected, rtol=4 * rtol, atol=4 * atol)
