"""How ops are registered: lowered lazily by their decomposition, cached with their source."""

from __future__ import annotations

import pytest
import torch
from samples import SAMPLES, maker
from torch import Tensor
from torch.utils import _pytree as pytree

import xtrain.ops
from xtrain import torch_compat
from xtrain.ops import OPS, core, dropout


def test_table_is_consistent():
    for name, op in OPS.items():
        assert op.name == name
        assert op.forward.name() == f"xtrain::{name}"
        assert op.backward.name() == f"xtrain::{name}_backward"
        for overload in (op.forward, op.backward):
            assert not overload._schema.is_mutable
            assert torch.Tag.pt2_compliant_tag in overload.tags
        assert op.public.__doc__ and op.reference.__doc__


@pytest.mark.parametrize("name", OPS)
def test_decomposition_equals_the_eager_kernel(name):
    """What inductor fuses and what eager runs say the same."""
    for args in SAMPLES[name](maker("contiguous", torch.float32)):
        outs = pytree.tree_leaves(OPS[name].forward(*args))
        others = pytree.tree_leaves(OPS[name].decomposition(*args))
        for out, other in zip(outs, others, strict=True):
            torch.testing.assert_close(other, out, rtol=1e-5, atol=1e-5)
            assert other.dtype == out.dtype


@pytest.mark.parametrize("name", OPS)
def test_meta_tensors(name):
    args = next(iter(SAMPLES[name](maker("contiguous", torch.bfloat16))))
    real = pytree.tree_leaves(OPS[name].forward(*args))
    meta = pytree.tree_leaves(
        OPS[name].forward(*pytree.tree_map_only(Tensor, lambda t: t.to("meta"), args))
    )
    for r, m in zip(real, meta, strict=True):
        assert (m.device.type, m.shape, m.dtype) == ("meta", r.shape, r.dtype)


def test_compiled_kernels_are_cached_with_the_source():
    """Another source hash in the tag means another key: no stale kernel after an upgrade."""
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache

    assert f"xtrain.ops-{xtrain.ops._source_hash()}" in torch.compiler.config.cache_key_tag
    x, seed = torch.ones(16), torch.tensor(1)

    def misses() -> int:
        torch._dynamo.reset()
        counters.clear()
        torch.compile(lambda t: dropout(t, 0.5, seed), fullgraph=True)(x)
        return counters["inductor"]["fxgraph_cache_miss"]

    with fresh_cache():
        assert misses() == 1
        assert misses() == 0
        with torch.compiler.config.patch(cache_key_tag="xtrain.ops-other"):
            assert misses() == 1


def test_source_hash_follows_the_source(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("a = 1\n")
    monkeypatch.setattr(xtrain.ops, "__file__", str(tmp_path / "__init__.py"))
    before = xtrain.ops._source_hash()
    (tmp_path / "a.py").write_text("a = 2\n")
    assert xtrain.ops._source_hash() != before


def test_tensor_constant_in_a_decomposition_is_refused():
    """make_fx would lift it to an attribute that inductor's graph does not have."""
    op = core.define_op(
        "test_constant(Tensor x) -> Tensor",
        fake=torch.empty_like,
        decomposition=lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
    )
    with pytest.raises(Exception, match="build constants from Python numbers"):
        torch.compile(lambda x: op(x), fullgraph=True)(torch.ones(3))


def test_argument_error_is_a_value_error_everywhere():
    assert type(torch_compat.argument_error("why")) is ValueError
    for fullgraph in (True, False):
        with pytest.raises(ValueError, match=r"p must be in \[0, 1\], got 2.0"):
            torch.compile(lambda x: dropout(x, 2.0, 1), fullgraph=fullgraph)(torch.ones(3))


@pytest.fixture(scope="module")
def two_forms() -> torch._ops.OpOverload:
    """An op whose kernel and decomposition tell themselves apart."""
    return core.define_op(
        "test_two_forms(Tensor x, float factor, bool opaque=False) -> (Tensor, Tensor)",
        fake=lambda x, factor: (torch.empty_like(x), torch.empty_like(x)),
        decomposition=lambda x, factor: (x * factor, x + 1),
        cpu=lambda x, factor: (x * factor, x + 2),
    )


@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize("how", ["position", "keyword"])
def test_opaque_keeps_the_kernel_inside_inductor(two_forms, opaque, how):
    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = x.t() * 3
        if how == "position":
            return two_forms(y, 2.0, opaque)
        return two_forms(y, 2.0, opaque=opaque)

    x = torch.arange(6.0).view(2, 3)
    product, other = torch.compile(function, fullgraph=True)(x)
    assert torch.equal(product, x.t() * 6)
    assert torch.equal(other, x.t() * 3 + (2 if opaque else 1))
    assert torch.equal(function(x)[1], x.t() * 3 + 2)  # eager runs the kernel either way


def test_opaque_by_preference_only_where_a_compiler_reads_it():
    def prefers_kernel(x: Tensor, *, wide: bool) -> bool:
        return wide and x.shape[-1] > 2

    x, seen = torch.ones(3), []

    def function(x: Tensor) -> Tensor:
        seen.append(core.opaque(prefers_kernel, x, wide=True))
        return x + 1

    function(x)
    assert seen == [False]
    compiled = torch.compile(
        lambda x: x * core.opaque(prefers_kernel, x, wide=True), backend="eager", fullgraph=True
    )
    assert torch.equal(compiled(x), x) and torch.equal(compiled(x[:2]), torch.zeros(2))
