"""StepKeys: one key per training forward. ReplayLedger: a recompute is given its forward's."""

from __future__ import annotations

import pytest
import torch

from xtrain.compiler.step_keys import ReplayLedger, StepKey, StepKeys


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
