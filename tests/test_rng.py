"""Site seeds: distinct, uncorrelated, fixed for ever; class E0 of docs/design.md."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import mask_oracle
import numpy as np
import pytest
import torch

from xtrain import ops, rng
from xtrain.rng import site_seed

GOLDEN = json.loads((Path(__file__).parent / "golden" / "dropout_masks.json").read_text())
MASK64 = 2**64 - 1


def numpy_mix(x):
    return int(mask_oracle.splitmix64(np.uint64(x & MASK64)))


def numpy_site_seed(base_seed, step, layer, site):
    """The fold of the module's docstring, on NumPy's splitmix64; a name is folded by 8 bytes."""
    if isinstance(site, str):
        data = site.encode()
        state = numpy_mix(len(data))
        for word in range(0, len(data), 8):
            state = numpy_mix(state ^ int.from_bytes(data[word : word + 8], "little"))
        site = state
    state = numpy_mix(base_seed)
    for value in (step, layer, site):
        state = numpy_mix(state ^ (value & MASK64))
    return state - 2**64 if state >> 63 else state


@pytest.mark.parametrize("row", GOLDEN["splitmix64"], ids=lambda row: row["x"])
def test_splitmix64_known_values(row):
    assert rng.splitmix64(int(row["x"])) == int(row["y"])


def test_splitmix64_takes_its_argument_mod_2_64():
    assert rng.splitmix64(-1) == rng.splitmix64(MASK64)
    assert rng.splitmix64(2**64 + 5) == rng.splitmix64(5) == numpy_mix(5)


TUPLES = [
    (0, 0, 0, "attention"),
    (0, 0, 0, "feed_forward"),
    (1234, 5, 3, "cross_attention"),
    (1234, 5, 3, "decoder.pooler.feed_forward"),
    (-1, -2, 3, 0),
    (2**63, 2**64 + 7, 11, 1),
    (0, 0, 0, ""),
]


@pytest.mark.parametrize("values", TUPLES, ids=str)
def test_site_seed_is_the_documented_fold(values):
    assert site_seed(*values) == numpy_site_seed(*values)
    assert -(2**63) <= site_seed(*values) < 2**63


def test_site_seeds_never_change():
    """A run that is resumed by a later version must draw the masks that it began with."""
    assert [site_seed(*values) for values in TUPLES[:4]] == [
        917998279121269654,
        3079729272206495934,
        -3437042606441855696,
        6093602650364486572,
    ]


def test_all_tuples_are_distinct():
    """XOR or a sum of the values would collide at once: (step 0, layer 1) with (1, 0)."""
    sites = ("attention", "cross_attention", "feed_forward", "attention_2", 0, 1, 2)
    grid = itertools.product((0, 1, 2, -1, 2**40), range(60), range(40), sites)
    seeds = [site_seed(*values) for values in grid]
    assert len(set(seeds)) == len(seeds) == 5 * 60 * 40 * 7


def test_arguments_are_taken_mod_2_64():
    for position in range(3):
        for value in (0, 7, -3, 2**63):
            near, far = [1, 2, 3, "attention"], [1, 2, 3, "attention"]
            near[position], far[position] = value, value + 2**64
            assert site_seed(*near) == site_seed(*far)
    assert site_seed(0, 0, 0, -1) == site_seed(0, 0, 0, MASK64)
    assert site_seed(np.int64(4), np.int32(3), torch.tensor(2), np.uint64(1)) == site_seed(
        4, 3, 2, 1
    )


@pytest.mark.parametrize("name", ["base_seed", "step", "layer", "site"])
@pytest.mark.parametrize("wrong", [True, 1.0, None, b"attention", float("nan")])
def test_what_is_no_int_is_refused(name, wrong):
    values = dict(base_seed=0, step=0, layer=0, site=0)
    with pytest.raises(TypeError, match=f"{name} must be an int, got .*{str(wrong)[:4]}"):
        site_seed(**{**values, name: wrong})


def test_names_are_sites_and_nothing_else():
    with pytest.raises(TypeError, match="layer must be an int, got 'attention'"):
        site_seed(0, 0, "attention", 0)


# --- row C7: masks of different keys are uncorrelated -------------------------------------------

N = 1 << 18
KEYS = list(itertools.product(range(4), range(4), range(4), range(2)))  # step, rank, layer, site


@pytest.fixture(scope="module", params=[0.5, 0.1])
def masks(request):
    """p and keep [128, N]: rank r holds the elements from r * N on of the global batch."""
    rows = [
        ops.dropout_mask(N, request.param, site_seed(7, step, layer, site), rank * N)
        for step, rank, layer, site in KEYS
    ]
    return request.param, torch.stack(rows)


def counts_of(keep):
    """How many elements each pair of masks both keeps, and each mask; exact: fp32 holds 2^24."""
    kept = keep.float()
    return (kept @ kept.T).double(), kept.sum(1).double()


def off_diagonal(matrix):
    return matrix[~torch.eye(len(KEYS), dtype=torch.bool)]


def test_masks_of_different_keys_are_uncorrelated(masks):
    both, one = counts_of(masks[1])
    spread = (one * (N - one)).sqrt()
    phi = (N * both - one[:, None] * one) / (spread[:, None] * spread)
    assert torch.allclose(phi.diagonal(), torch.ones(len(KEYS)).double())
    assert float(off_diagonal(phi).abs().max()) < 5 / N**0.5, "0.0098: five sigma"


def test_pairs_agree_as_often_as_chance(masks):
    p, keep = masks
    both, one = counts_of(keep)
    agreement = (2 * both - one[:, None] - one + N) / N
    chance = p**2 + (1 - p) ** 2
    # Five sigma of the pair, and of each keep rate, which counts unless p is 0.5.
    slack = 5 * (chance * (1 - chance) / N) ** 0.5
    slack += 2 * 5 * abs(1 - 2 * p) * (p * (1 - p) / N) ** 0.5
    assert float(off_diagonal(agreement - chance).abs().max()) < slack


def test_keep_rates_are_within_five_sigma(masks):
    p, keep = masks
    rates = keep.double().mean(1)
    assert float((rates - (1 - p)).abs().max()) < 5 * (p * (1 - p) / N) ** 0.5


def test_the_same_key_gives_the_same_mask_and_ranks_are_slices(masks):
    p, keep = masks
    step, layer, site = 3, 2, 1
    whole = ops.dropout_mask(4 * N, p, site_seed(7, step, layer, site)).view(4, N)
    mine = [i for i, key in enumerate(KEYS) if (key[0], *key[2:]) == (step, layer, site)]
    assert [KEYS[i][1] for i in mine] == [0, 1, 2, 3]
    assert torch.equal(keep[mine], whole)
