"""Site seeds never change; every training forward has one key, and its recompute the same."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import mask_oracle
import numpy as np
import pytest
import torch

from xtrain import ops, rng
from xtrain.compiler.step_keys import ReplayLedger, StepKey, StepKeys
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


# --- StepKeys and ReplayLedger --------------------------------------------------------------------


def test_steps_count_up_from_zero():
    keys = StepKeys(7)
    assert [keys.advance(0) for _ in range(3)] == [StepKey(7, step, 0) for step in range(3)]


def test_set_step_binds_one_forward():
    keys = StepKeys(7)
    keys.advance(4)
    keys.set_step(10, first_sample=6)
    assert keys.is_bound
    assert keys.advance(4) == StepKey(7, 10, 6)
    assert not keys.is_bound
    assert keys.advance(4) == StepKey(7, 11, 4), "the last step + 1, the default first sample"


def test_the_last_set_step_before_a_forward_counts():
    keys = StepKeys(7)
    keys.set_step(10, 6)
    keys.set_step(3)
    assert keys.advance(9) == StepKey(7, 3, 0), "first_sample is 0 unless named"
    keys.set_step(-5)
    assert [keys.advance(0).step for _ in range(2)] == [-5, -4]


def test_without_a_seed_each_forward_draws_once_from_torchs_generator():
    def bases(count):
        return [int(torch.randint(-(2**63), 2**63 - 1, ())) for _ in range(count)]

    torch.manual_seed(3)
    expected = [StepKey(base, 0, sample) for base, sample in zip(bases(2), (0, 8), strict=True)]
    torch.manual_seed(3)
    keys = StepKeys(None)
    assert [keys.advance(0), keys.advance(8)] == expected
    assert expected[0].base_seed != expected[1].base_seed
    state = torch.get_rng_state()
    StepKeys(7).advance(0)
    assert torch.equal(torch.get_rng_state(), state), "a given seed draws nothing"


def test_without_a_seed_the_step_does_not_enter_the_key():
    keys = StepKeys(None)
    torch.manual_seed(3)
    keys.set_step(12, first_sample=2)
    bound = keys.advance(0)
    torch.manual_seed(3)
    assert StepKeys(None).advance(2) == bound


@pytest.mark.parametrize("wrong", [1.0, True, "3", None, float("nan")])
def test_wrong_values_are_named(wrong):
    keys = StepKeys(0)
    with pytest.raises(TypeError, match="^step must be an int, got"):
        keys.set_step(wrong)
    with pytest.raises(TypeError, match="^first_sample must be an int, got"):
        keys.set_step(0, wrong)
    if wrong is not None:
        with pytest.raises(TypeError, match="^seed must be an int, got"):
            StepKeys(wrong)
    assert not keys.is_bound


def test_a_negative_first_sample_is_refused():
    keys = StepKeys(0)
    with pytest.raises(ValueError, match="first_sample must be 0 or more, got -1"):
        keys.set_step(0, -1)
    assert keys.advance(0) == StepKey(0, 0, 0)


# --- replays ------------------------------------------------------------------------------------


def test_a_replay_is_found_by_its_tensors():
    ledger = ReplayLedger[str]()
    a, b = torch.zeros(3), torch.zeros(3)
    ledger.record("forward", [a], "first")
    ledger.record("forward", [b], "second")
    assert ledger.find("forward", [b]) == "second"
    assert ledger.find("forward", [a]) == "first"
    assert ledger.find("forward", [a]) == "first", "a second backward of a retained graph"


def test_views_and_aliases_of_the_same_memory_are_the_same_call():
    ledger = ReplayLedger[str]()
    x = torch.zeros(4, 3)
    ledger.record("forward", [x], "value")
    assert ledger.find("forward", [x.view(4, 3)]) == "value"
    assert ledger.find("forward", [x.detach()]) == "value"
    for other in (x[:2], x.view(3, 4), x.T, x.view(torch.int32), x.clone()):
        with pytest.raises(RuntimeError, match="no forward of it"):
            ledger.find("forward", [other])


def test_scopes_are_apart():
    ledger = ReplayLedger[str]()
    x = torch.zeros(3)
    ledger.record(1, [x], "graph 1")
    ledger.record(2, [x], "graph 2")
    assert (ledger.find(1, [x]), ledger.find(2, [x])) == ("graph 1", "graph 2")
    with pytest.raises(RuntimeError, match="no forward of it could be the one"):
        ledger.find(3, [x])


def test_several_forwards_on_one_tensor_are_refused_unless_they_agree():
    ledger = ReplayLedger[StepKey]()
    x = torch.zeros(3)
    ledger.record("forward", [x], StepKey(0, 0, 0))
    ledger.record("forward", [x], StepKey(0, 1, 0))
    with pytest.raises(RuntimeError, match=r"several forwards.*set_step.*checkpoint inside"):
        ledger.find("forward", [x])
    same = ReplayLedger[StepKey]()
    for _ in range(2):
        same.record("forward", [x], StepKey(0, 0, 0))
    assert same.find("forward", [x]) == StepKey(0, 0, 0)


def test_tensor_values_agree_by_content():
    ledger = ReplayLedger[torch.Tensor]()
    x = torch.zeros(3)
    ledger.record("graph", [x], torch.tensor([1, 2]))
    ledger.record("graph", [x], torch.tensor([1, 2]))
    assert ledger.find("graph", [x]).tolist() == [1, 2]
    ledger.record("graph", [x], torch.tensor([1, 3]))
    ledger.record("graph", [x], torch.tensor([1, 2]))
    with pytest.raises(RuntimeError, match="several forwards"):
        ledger.find("graph", [x])


def test_a_step_that_was_recomputed_does_not_block_the_next_on_the_same_tensor():
    """Training that reuses one input buffer: each forward is recomputed before the next."""
    ledger = ReplayLedger[int]()
    x = torch.zeros(3)
    for step in range(4):
        ledger.record("forward", [x], step)
        assert ledger.find("forward", [x]) == step


def test_freed_memory_that_comes_back_is_not_taken_for_the_old_tensor():
    ledger = ReplayLedger[str]()
    x = torch.zeros(1000)
    address = x.data_ptr()
    ledger.record("forward", [x], "old")
    del x
    fresh = [torch.zeros(1000) for _ in range(20)]
    again = [t for t in fresh if t.data_ptr() == address]
    for tensor in again or fresh:
        with pytest.raises(RuntimeError, match="no forward"):
            ledger.find("forward", [tensor])


def test_memory_stays_bounded_and_living_calls_stay_known():
    ledger = ReplayLedger[int](capacity=16)
    kept = torch.zeros(3)
    ledger.record("forward", [kept], -1)
    for step in range(100):
        ledger.record("forward", [torch.zeros(3)], step)
        assert len(ledger._entries) <= 16
    assert ledger.find("forward", [kept]) == -1
