"""The model's own functions: RoPE, head split and merge, RMSNorm, loss; values and gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from xtrain import model as M


def test_rope_is_rotate_half():
    cos, sin = torch.cos(torch.tensor([[1.0, 0.0]])), torch.sin(torch.tensor([[1.0, 0.0]]))
    x = torch.tensor([1.0, 0, 0, 0]).reshape(1, 1, 1, 4)
    expected = torch.tensor([0.540302, 0, 0.841471, 0])
    torch.testing.assert_close(M.apply_rope(x, cos, sin).flatten(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("default_dtype", [torch.float32, torch.bfloat16])
def test_rope_tables_stay_fp32(autocast, default_dtype):
    positions = torch.arange(4096)
    torch.set_default_dtype(default_dtype)
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            cos, sin = M.rope_tables(positions, 128, 10000.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (4096, 64)
    assert abs(cos[4095, 0] - -0.06598) < 1e-5  # bf16 rounds 4095 to 4096: 0.80399
    assert abs(cos[257, 0] - 0.81931) < 1e-5  # bf16 rounds 257 to 256: -0.03979
    # fp32 rounds the frequency, then the angle: each half an ulp, 2^-24 of an angle of up to 4095;
    # the power itself is allowed two ulps.
    angles = np.arange(4096)[:, None] * 10000.0 ** (-np.arange(0, 128, 2) / 128)
    bound = 4 * 2.0**-24 * np.maximum(angles, 1)
    assert (np.abs(cos.double().numpy() - np.cos(angles)) <= bound).all()
    assert (np.abs(sin.double().numpy() - np.sin(angles)) <= bound).all()


def test_rope_tables_take_any_positions():
    rows = torch.tensor([[5, 0, 7], [300, 4095, 1]])
    cos, sin = M.rope_tables(rows, 8, 500.0)
    all_cos, all_sin = M.rope_tables(torch.arange(4096), 8, 500.0)
    assert torch.equal(cos, all_cos[rows]) and torch.equal(sin, all_sin[rows])


def test_attention_scores_depend_on_distance_alone():
    rng = np.random.default_rng(0)
    q, k = torch.from_numpy(rng.standard_normal((2, 1, 1, 1, 16)))
    cos, sin = M.rope_tables(torch.arange(64), 16, 10000.0)
    turned_q = M.apply_rope(q.expand(1, 64, 1, 16), cos, sin)[0, :, 0]
    turned_k = M.apply_rope(k.expand(1, 64, 1, 16), cos, sin)[0, :, 0]
    scores = turned_q @ turned_k.T
    for distance in (0, 1, 17):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(
            diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=2e-5
        )  # fp32 angles up to 64
    assert abs(scores[0, 0] - (q * k).sum()) < 1e-12


def test_rms_norm_casts_before_it_multiplies():
    norm = M.RMSNorm(4, 1e-6).to(torch.bfloat16)
    with torch.no_grad():
        norm.weight.fill_(0.7)
    x = torch.tensor([1.0, 1.0, 2.0, 3.0], dtype=torch.bfloat16)
    assert norm(x).tolist() == [0.361328125, 0.361328125, 0.72265625, 1.078125]


def test_loss_is_the_mean_over_targets_that_count():
    logits = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 3, 5)))
    targets = torch.tensor([[1, -100, 4], [-100, -100, 0]])
    z = logits.numpy()
    rows = [(0, 0, 1), (0, 2, 4), (1, 2, 0)]
    expected = np.mean([np.log(np.exp(z[b, t]).sum()) - z[b, t, v] for b, t, v in rows])
    assert abs(M.cross_entropy(logits, targets).item() - expected) < 1e-12


def test_gradcheck_embedding_with_repeated_ids():
    ids = torch.tensor([[3, 0, 3], [3, 1, 0]])
    table = torch.from_numpy(np.random.default_rng(0).standard_normal((4, 3)))
    embedding = torch.nn.Embedding.from_pretrained(table, freeze=False)

    def lookup(weight):
        return torch.func.functional_call(embedding, {"weight": weight}, (ids,))

    assert gradcheck(lookup, table.requires_grad_())


def test_gradcheck_parts():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return torch.from_numpy(rng.standard_normal(shape)).requires_grad_()

    cos, sin = (table.double() for table in M.rope_tables(torch.arange(3), 4, 10.0))
    assert gradcheck(lambda x: M.split_heads(x, 4), draw(2, 3, 8))
    assert gradcheck(M.merge_heads, draw(2, 2, 3, 4))
    assert gradcheck(lambda x: M.apply_rope(x, cos, sin), draw(1, 3, 2, 4))
    assert gradcheck(
        lambda x, w: torch.func.functional_call(M.RMSNorm(5, 1e-6), {"weight": w}, (x,)),
        (draw(2, 5), draw(5)),
    )
    targets = torch.tensor([[0, -100, 3]])
    assert gradcheck(lambda logits: M.cross_entropy(logits, targets), draw(1, 3, 4))


def test_split_and_merge_are_inverse_and_keep_order():
    x = torch.arange(24.0).reshape(1, 2, 12)
    heads = M.split_heads(x, 4)
    assert heads.shape == (1, 2, 3, 4) and heads[0, 1, 2].tolist() == [20, 21, 22, 23]
    merged = M.merge_heads(heads.transpose(1, 2))
    assert torch.equal(merged, x) and merged.data_ptr() == x.data_ptr()  # no copy either way
