"""The default first_sample: rank x batch under plain data parallelism, else a clear refusal.

torch.distributed is played by a stand-in here; test_ddp.py runs two real processes.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from xtrain.compiler.data_parallel import first_sample


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
