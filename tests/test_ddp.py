"""Two gloo processes and what each asks the other: masks by rank, buckets, recompute, gradients."""

from __future__ import annotations

import contextlib
import os
import socket
import traceback
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from probe_model import P, ProbeModel, assert_masks, decode_masks, oracle_masks, tokens
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import apart

import xtrain
from xtrain.compiler.step_keys import first_sample
from xtrain.model import Config, Transformer

SEED = 99
# One pair of processes does the work of three tests, on whatever machine.
pytestmark = pytest.mark.timeout(1200)


def run_on_two_ranks(function, *args):
    """Run function(rank, *args) in two gloo processes; the first failure is raised here."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    queue = apart.Queue()
    workers = [
        apart.Process(target=_worker, args=(function, rank, port, queue, args), daemon=True)
        for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    results = dict(queue.get(timeout=1100) for _ in workers)
    for worker in workers:
        worker.join(timeout=60)
    for rank, (error, _) in sorted(results.items()):
        assert error is None, f"rank {rank}:\n{error}"
    return [results[rank][1] for rank in range(2)]


def _worker(function, rank, port, queue, args):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    error = value = None
    try:
        dist.init_process_group("gloo", rank=rank, world_size=2)
        value = function(rank, *args)
        dist.destroy_process_group()
    except BaseException:
        error = traceback.format_exc()
    queue.put((rank, (error, value)))


def _probe(rank, backend, checkpointed):
    """Masks of three DDP steps under the default first_sample, buckets of a few parameters."""
    model = ProbeModel(num_layers=4, checkpointed=checkpointed)
    compiled = xtrain.compile(model, dropout=P, seed=SEED, backend=backend)
    ddp = DistributedDataParallel(compiled, bucket_cap_mb=0.0005)
    for step in range(3):
        out = ddp(tokens())
        out.sum().backward()
        wanted = oracle_masks(SEED, step, num_layers=4, first_sample=rank * 4)
        assert_masks(decode_masks(out, 4), wanted)
    report = compiled.report()
    return len(report.sites), report.num_train_graphs, report.notes


def _unequal(rank):
    compiled = xtrain.compile(ProbeModel(), dropout=P, seed=SEED, backend="eager")
    with pytest.raises(ValueError, match=r"different sizes \[2, 3\].*set_step"):
        compiled(tokens(2 + rank))
    compiled.set_step(0, first_sample=2 * rank)  # said by the caller: nothing to check
    out = compiled(tokens(2 + rank))
    assert_masks(decode_masks(out, 2), oracle_masks(SEED, 0, tuple(out.shape), 2, 2 * rank))


def test_masks_by_rank_under_ddp_and_unequal_local_batches_are_refused(ranks):
    for results in ranks:
        for checkpointed, (sites, graphs, notes) in results["probes"].items():
            assert sites == 8
            assert graphs == 1
            assert checkpointed == any("graph splitter is off" in note for note in notes)


def _config(recompute):
    return Config.preset("tiny", n_layers=2, vocab_size=64, recompute=recompute)


def _model(recompute):
    torch.manual_seed(3)
    return Transformer(_config(recompute))


def _tokens():
    return torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(5))


def _five_steps(rank, backend):
    """Five DDP steps with recompute and dropout; returns the reduced gradients of each."""
    model = _model("full")
    compiled = xtrain.compile(model, dropout=0.1, seed=SEED, backend=backend)
    ddp = DistributedDataParallel(compiled, bucket_cap_mb=0.01)
    part = _tokens()[2 * rank : 2 * rank + 2]
    steps = []
    for _ in range(5):
        ddp.zero_grad(set_to_none=True)
        _, loss = ddp(part[:, :-1], part[:, 1:])
        loss.backward()
        steps.append({name: p.grad.numpy().copy() for name, p in model.named_parameters()})
    return steps, len(compiled.report().sites)


def test_gradients_equal_one_process_on_the_joint_batch(ranks):
    """Row C17: DDP + compile + recompute + dropout, against one process that holds all samples."""
    (first, sites), (second, _) = (results["steps"] for results in ranks)
    assert sites == 4
    model = _model("none")
    compiled = xtrain.compile(model, dropout=0.1, seed=SEED, backend="eager")
    ids = _tokens()
    for step in range(5):
        model.zero_grad(set_to_none=True)
        compiled(ids[:, :-1], ids[:, 1:])[1].backward()
        for name, parameter in model.named_parameters():
            scale = parameter.grad.abs().max()
            for rank_steps in (first, second):
                error = (torch.from_numpy(rank_steps[step][name]) - parameter.grad).abs().max()
                assert error <= 1e-5 * scale, f"step {step}, {name}: {error} of {scale}"


# --- unchanged models of transformers -----------------------------------------------------------

LAYERS, SAMPLES = 3, 8


def _llama(checkpointed, unused=False):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=2, vocab_size=64)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, **sizes)).train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if unused:  # a part that this loss never reaches
        model.value_head = torch.nn.Linear(32, 1)
    return model


def _ids():
    return torch.randint(64, (SAMPLES, 9), generator=torch.Generator().manual_seed(5))


# name -> (per_block, checkpointed, options of DDP): all of them in one pair of processes
WRAPPED = {
    "whole, checkpoints": (False, True, {}),
    "blocks, checkpoints": (True, True, {}),
    "blocks, unused": (True, False, {"find_unused_parameters": True}),
    "whole, unused": (
        False,
        False,
        dict(find_unused_parameters=True, gradient_as_bucket_view=True),
    ),
}


def _accumulating_steps(rank, per_block, checkpointed, ddp_options):
    """Two steps of two micro-batches, the first under no_sync; the gradients of each step."""
    torch._dynamo.reset()
    compile_it = xtrain.compile_blocks if per_block else xtrain.compile
    model = _llama(checkpointed, unused="find_unused_parameters" in ddp_options)
    compiled = compile_it(model, dropout=0.1, seed=SEED, backend="aot_eager")
    ddp = DistributedDataParallel(compiled, bucket_cap_mb=0.01, **ddp_options)
    steps = []
    for step in range(2):
        ddp.zero_grad(set_to_none=True)
        for micro in range(2):
            first = 4 * rank + 2 * micro
            compiled.set_step(step, first_sample=first)
            part = _ids()[first : first + 2]
            with ddp.no_sync() if micro == 0 else contextlib.nullcontext():
                (ddp(input_ids=part, labels=part).loss / 2).backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        steps.append({name: gradient.numpy().copy() for name, gradient in gradients.items()})
    report = compiled.report()
    return steps, (len(report.sites), len(compiled.last_executed_sites), report.num_train_graphs)


def test_an_unchanged_llama_that_accumulates_gradients(ranks):
    """Row C17 on transformers' own model and checkpoints, compiled whole or block by block."""
    model = _llama(checkpointed=False)
    compiled = xtrain.compile(model, dropout=0.1, seed=SEED, backend="eager")
    for step in range(2):
        model.zero_grad(set_to_none=True)
        compiled(input_ids=_ids(), labels=_ids()).loss.backward()
        for name, (steps, counted) in (i for rank in ranks for i in rank["llama"].items()):
            assert counted == (2 * LAYERS, 2 * LAYERS, 1), name
            for path, parameter in model.named_parameters():
                scale = parameter.grad.abs().max()
                error = (torch.from_numpy(steps[step][path]) - parameter.grad).abs().max()
                assert error <= 1e-5 * scale, f"{name}, step {step}, {path}: {error} of {scale}"


# --- all that runs in two processes ---------------------------------------------------------------


def _everything(rank):
    """Plain and checkpointed probes, local batches of two sizes, five steps, wrapped models."""
    probes = {}
    for checkpointed in (False, True):
        probes[checkpointed] = _probe(rank, "aot_eager", checkpointed)
        torch._dynamo.reset()
    _unequal(rank)
    torch._dynamo.reset()
    steps = _five_steps(rank, "inductor")
    llama = {name: _accumulating_steps(rank, *options) for name, options in WRAPPED.items()}
    return {"probes": probes, "steps": steps, "llama": llama}


@pytest.fixture(scope="module")
def ranks():
    """What each rank found: one pair of processes for all."""
    return run_on_two_ranks(_everything)


# --- the default first_sample ---------------------------------------------------------------------


# torch.distributed is played by a stand-in here.


class Ranks:
    """Two or more ranks, of which this process is one; the others' batches are given."""

    def __init__(self, rank, batches):
        self.rank, self.batches, self.gathers = rank, batches, 0

    def install(self, monkeypatch):
        dist = torch.distributed
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda group=None: len(self.batches))
        monkeypatch.setattr(dist, "get_rank", lambda group=None: self.rank)
        monkeypatch.setattr(dist, "get_backend", lambda group=None: "gloo")
        monkeypatch.setattr(dist, "all_gather", self.all_gather)
        return self

    def all_gather(self, outputs, mine, group=None):
        self.gathers += 1
        for i, output in enumerate(outputs):
            output.copy_(mine if i == self.rank else torch.tensor([self.batches[i]]))


def test_a_single_process_begins_at_0(monkeypatch):
    assert first_sample(nn.Linear(2, 2), 4, None) == 0
    ranks = Ranks(0, [4]).install(monkeypatch)
    assert first_sample(nn.Linear(2, 2), 4, None) == 0 and ranks.gathers == 0


def test_ranks_follow_one_another_and_ask_each_other_once(monkeypatch):
    model = nn.Linear(2, 2)
    ranks = Ranks(2, [4, 4, 4]).install(monkeypatch)
    assert [first_sample(model, 4, None) for _ in range(3)] == [8, 8, 8]
    assert ranks.gathers == 1
    assert first_sample(model, 4, group="another") == 8 and ranks.gathers == 2


def test_unequal_batches_are_refused(monkeypatch):
    Ranks(0, [4, 3]).install(monkeypatch)
    with pytest.raises(ValueError, match=r"different sizes \[4, 3\]; call set_step\(step, first_s"):
        first_sample(nn.Linear(2, 2), 4, None)


def test_a_batch_that_changes_is_refused_without_asking(monkeypatch):
    """Asking would hang where the other ranks' batches did not change."""
    model = nn.Linear(2, 2)
    ranks = Ranks(1, [4, 4]).install(monkeypatch)
    first_sample(model, 4, None)
    with pytest.raises(ValueError, match="changed from 4 to 3 samples.*call set_step"):
        first_sample(model, 3, None)
    assert ranks.gathers == 1 and first_sample(model, 4, None) == 4


def test_another_model_may_have_another_batch(monkeypatch):
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    ranks = Ranks(1, [4, 4]).install(monkeypatch)
    assert first_sample(one, 4, None) == 4
    ranks.batches = [8, 8]
    assert first_sample(two, 8, None) == 8
    assert first_sample(one, 4, None) == 4


@pytest.mark.parametrize(
    ("names", "refused"),
    [
        (("dp",), None),
        (("dp_replicate", "dp_shard"), None),
        (None, None),
        (("dp", "tp"), "tp"),
        (("cp",), "cp"),
        (("pp", "dp"), "pp"),
    ],
)
def test_meshes_that_are_not_all_data_parallel_are_refused(monkeypatch, names, refused):
    model = nn.Linear(2, 2)
    model.weight.device_mesh = SimpleNamespace(mesh_dim_names=names)
    Ranks(1, [4, 4]).install(monkeypatch)
    if refused is None:
        assert first_sample(model, 4, None) == 4
        return
    with pytest.raises(ValueError, match=rf"weight .*dimension '{refused}'.*data_parallel_group"):
        first_sample(model, 4, None)
    assert first_sample(model, 4, group="named") == 4, "a named group says what is data parallel"
