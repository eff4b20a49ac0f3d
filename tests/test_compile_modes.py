"""Class E0: one mask per (seed, step, layer, site, element), whatever runs the model."""

from __future__ import annotations

import pytest
import torch
from probe_model import (
    SITES,
    P,
    ProbeModel,
    assert_masks,
    decode_masks,
    gradient_masks,
    oracle_masks,
    tokens,
)
from torch.utils.checkpoint import checkpoint

import xtrain

SEED = 1234


def expected(step, shape=(4, 5, 8), num_layers=2, first_sample=0, seed=SEED):
    return oracle_masks(seed, step, shape, num_layers, first_sample)


def check_step(compiled, model, step, num_layers=2, call=None):
    """One training forward and backward: masks seen by both equal the oracle's."""
    model.zero_grad(set_to_none=True)
    out = (call or compiled)(tokens())
    out.sum().backward()
    wanted = expected(step, tuple(out.shape), num_layers)
    assert_masks(decode_masks(out, num_layers), wanted, "forward")
    assert_masks(gradient_masks(model), wanted, "backward")


@pytest.mark.parametrize(
    ("backend", "checkpointed"),
    [("eager", False), ("aot_eager", False), ("aot_eager", True), ("inductor", True)],
)
def test_masks_equal_the_oracle(backend, checkpointed):
    model = ProbeModel(checkpointed=checkpointed)
    compiled = xtrain.compile(model, dropout=P, seed=SEED, backend=backend)
    for step in range(3):
        check_step(compiled, model, step)
    report = compiled.report()
    assert [(s.layer, s.site) for s in report.sites] == [(i, s) for i in range(2) for s in SITES]
    assert report.num_train_graphs == 1


@pytest.mark.parametrize(
    "breaks", ["before the blocks", "between the blocks", "between the branches"]
)
def test_masks_across_graph_breaks(breaks):
    model = ProbeModel(num_layers=3, breaks=breaks)
    compiled = xtrain.compile(model, dropout=P, seed=SEED, backend="aot_eager")
    for step in range(2):
        check_step(compiled, model, step, num_layers=3)
    assert len(compiled.report().sites) == 6


def test_masks_block_by_block():
    model = ProbeModel(num_layers=4)
    compiled = xtrain.compile_blocks(model, dropout=P, seed=SEED)
    for step in range(2):
        check_step(compiled, model, step, num_layers=4)
    assert compiled.report().num_train_graphs == 1, "four equal layers share one graph"


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_masks_block_by_block_with_checkpoints_around_each(use_reentrant):
    """Reentrant: the forward runs under no_grad, so its graph is not the recompute's."""
    model = ProbeModel(num_layers=3, checkpointed=True)
    model.use_reentrant = use_reentrant
    compiled = xtrain.compile_blocks(model, dropout=P, seed=SEED, backend="aot_eager")
    for step in range(2):
        check_step(compiled, model, step, num_layers=3)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_masks_with_a_checkpoint_around_the_compiled_model(use_reentrant):
    """The recompute re-enters the compiled forward in the backward: same key, nothing consumed."""
    model = ProbeModel()
    compiled = xtrain.compile(model, dropout=P, seed=SEED, backend="aot_eager")
    trigger = torch.zeros((), requires_grad=True)  # reentrant checkpoints need one such input

    def around(x):
        return checkpoint(lambda t, y: compiled(y) + t, trigger, x, use_reentrant=use_reentrant)

    for step in range(3):
        check_step(compiled, model, step, call=around)


def test_two_checkpointed_forwards_before_two_backwards():
    """Without checkpoints: test_compile_equality.py, in every backend."""
    model = ProbeModel()
    compiled = xtrain.compile(model, dropout=P, seed=SEED, backend="aot_eager")
    inputs = [tokens(), tokens()]
    outs = [checkpoint(compiled, x, use_reentrant=False) for x in inputs]
    for step in (1, 0):  # last first: the recompute must find its own forward
        model.zero_grad(set_to_none=True)
        outs[step].sum().backward()
        assert_masks(gradient_masks(model), expected(step), f"step {step}")


def test_an_ambiguous_recompute_is_refused():
    """Two forwards on one input tensor, under different keys: the recompute cannot know which."""
    model = ProbeModel()
    compiled = xtrain.compile(model, dropout=P, seed=SEED, backend="eager")
    same = tokens()
    outs = [checkpoint(compiled, same, use_reentrant=False) for _ in range(2)]
    with pytest.raises(RuntimeError, match="set_step"):
        outs[0].sum().backward()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_masks_in_bf16(backend):
    """Under autocast, and in weights."""
    model = ProbeModel()
    compiled = xtrain.compile(model, dropout=P, seed=SEED, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        check_step(compiled, model, 0)
    if backend == "aot_eager":
        compiled.to(torch.bfloat16)
        check_step(compiled, model, 1)


def test_set_step_makes_cuts_of_the_batch_equal():
    """4 samples at once, as 2 + 2 and as 1 + 3: the same masks, sample by sample."""
    model = ProbeModel()
    compiled = xtrain.compile(model, dropout=P, seed=SEED, backend="aot_eager")
    wanted = expected(7)
    for cuts in ([(0, 4)], [(0, 2), (2, 4)], [(2, 4), (0, 2)], [(0, 1), (1, 4)]):
        for start, end in cuts:
            compiled.set_step(7, first_sample=start)
            out = compiled(tokens(end - start))
            assert_masks(
                decode_masks(out, 2), [m[start:end] for m in wanted], f"samples {start} to {end}"
            )


def test_set_step_binds_one_forward():
    model = ProbeModel()
    compiled = xtrain.compile(model, dropout=P, seed=SEED, backend="eager")

    def masks():
        return decode_masks(compiled(tokens()), 2)

    assert_masks(masks(), expected(0), "the first forward is step 0")
    compiled.set_step(10, first_sample=4)
    compiled.eval()
    compiled(tokens())  # evaluation neither consumes nor advances
    compiled.train()
    assert_masks(masks(), expected(10, first_sample=4), "bound")
    assert_masks(masks(), expected(11), "last step + 1 and the default first sample")
    with torch.no_grad():
        assert_masks(masks(), expected(12), "training is self.training, also under no_grad")


def test_seed_none_follows_torchs_generator():
    model = ProbeModel()
    compiled = xtrain.compile(model, dropout=P, backend="eager")
    torch.manual_seed(5)
    first, second = compiled(tokens()), compiled(tokens())
    state = torch.get_rng_state()
    third = compiled(tokens())
    torch.set_rng_state(state)
    assert torch.equal(third, compiled(tokens()))
    torch.manual_seed(5)
    base = int(torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64))
    torch.manual_seed(5)
    assert torch.equal(first, compiled(tokens()))
    assert not torch.equal(first, second)
    assert_masks(decode_masks(first, 2), expected(0, seed=base))


def test_batch_and_length_become_dynamic_together():
    model = ProbeModel(shape=(9, 17, 8))  # larger than any batch below: no slice is whole
    compiled = xtrain.compile(model, dropout=P, seed=SEED)
    shapes = [(4, 5), (4, 9), (3, 9), (8, 16), (2, 3), (5, 11)]
    for step, (batch, length) in enumerate(shapes):
        out = compiled(tokens(batch, length))
        assert_masks(decode_masks(out, 2), expected(step, (batch, length, 8)), f"{batch, length}")
        compiled.set_step(step + 1, first_sample=0)
    compiled.set_step(50, first_sample=3)
    out = compiled(tokens(4, 9))
    assert_masks(decode_masks(out, 2), expected(50, (4, 9, 8), first_sample=3), "with an offset")
    assert compiled.report().num_train_graphs <= 2
