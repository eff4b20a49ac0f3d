"""Checkpoints: complete or absent under kills, truncation and a full disk; one set of names."""

from __future__ import annotations

import random
import resource
import shutil
import subprocess
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from training import apart

import xtrain
from xtrain import checkpoint
from xtrain.checkpoint import CheckpointError, load_model_tensors, model_tensors, parameter_names
from xtrain.model import Config, Transformer


def write(folder, step, *, keep_last=2, size=1000):
    tensors = {
        "model": {"a": torch.full((size,), float(step)), "b": torch.full((size,), step)},
        "optimizer": {"a/exp_avg": torch.full((size,), -float(step))},
    }
    return checkpoint.write(folder, step, tensors, {"note": f"step {step}"}, keep_last=keep_last)


def assert_is_step(loaded, step):
    assert loaded.step == step and loaded.state["note"] == f"step {step}"
    assert torch.all(loaded.tensors["model"]["a"] == step)
    assert torch.all(loaded.tensors["model"]["b"] == step)
    assert torch.all(loaded.tensors["optimizer"]["a/exp_avg"] == -step)


def test_what_was_read_does_not_depend_on_the_file(tmp_path):
    path = write(tmp_path, 5)
    loaded = checkpoint.read(path)
    for file in path.iterdir():
        file.write_bytes(b"")
    assert_is_step(loaded, 5)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_there_and_back_keeping_the_last_ones(tmp_path):
    for step in (1, 2, 30):
        path = write(tmp_path, step)
    assert names(tmp_path) == ["step_00000002", "step_00000030"]
    assert path == tmp_path / "step_00000030"
    assert names(path) == [
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    assert checkpoint.newest_complete(tmp_path) == (path, [])
    assert_is_step(checkpoint.read(path), 30)
    assert checkpoint.newest_complete(tmp_path / "none") == (None, [])


@pytest.mark.parametrize(
    "damage, reason",
    [
        (lambda f: f.write_bytes(f.read_bytes()[:-1]), r"has \d+ bytes, not \d+"),
        (lambda f: f.write_bytes(f.read_bytes()[:-1] + b"\x7f"), "is damaged"),
        (lambda f: f.unlink(), "is missing"),
    ],
    ids=["one byte short", "one byte changed", "gone"],
)
@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_damaged_file_sends_the_resume_one_back(tmp_path, file, damage, reason):
    """Row C41."""
    older, newest = write(tmp_path, 5), write(tmp_path, 10)
    damage(newest / file)
    found, passed_over = checkpoint.newest_complete(tmp_path)
    assert found == older
    assert len(passed_over) == 1 and passed_over[0].startswith(f"{newest}: {file}")
    with pytest.raises(CheckpointError, match=f"not a complete checkpoint: {file} {reason}"):
        checkpoint.read(newest)
    assert_is_step(checkpoint.read(older), 5)
    write(tmp_path, 10)  # the step is reached again: the damaged folder is replaced
    assert checkpoint.newest_complete(tmp_path) == (newest, [])
    assert_is_step(checkpoint.read(newest), 10)


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_a_damaged_checkpoint_takes_nobodys_place(tmp_path, keep_last):
    """A run resumed before a damaged checkpoint saves at earlier steps, and must keep those."""
    for step in (2, 4, 6, 10):
        write(tmp_path, step, keep_last=4)
    for step in (6, 10):
        (tmp_path / f"step_{step:08d}" / "model.safetensors").write_bytes(b"")
    newest = write(tmp_path, 8, keep_last=keep_last)
    kept = [2, 4, 8][-keep_last:]
    assert names(tmp_path) == [f"step_{step:08d}" for step in (*kept, 10)]
    assert checkpoint.newest_complete(tmp_path)[0] == newest
    assert_is_step(checkpoint.read(write(tmp_path, 10, keep_last=1)), 10)
    assert names(tmp_path) == ["step_00000010"]


def test_leftovers_are_never_taken_and_go_with_the_next_save(tmp_path):
    complete = write(tmp_path, 5)
    shutil.copytree(complete, tmp_path / ".tmp-step_00000009-77")
    shutil.copytree(complete, tmp_path / ".old-step_00000008-77")
    (tmp_path / "notes.txt").write_text("mine")
    assert checkpoint.newest_complete(tmp_path) == (complete, [])
    write(tmp_path, 6)
    assert names(tmp_path) == ["notes.txt", "step_00000005", "step_00000006"]


def save_in_a_loop(folder, step, reports):
    while True:
        reports.send(step)
        step += 1
        write(folder, step, size=20_000)


def received(reports):
    """Everything a killed process had sent."""
    values = []
    while True:
        try:
            values.append(reports.recv())
        except (EOFError, OSError):
            return values


def test_thirty_kills_while_saving(tmp_path):
    """Row C41: SIGKILL at a random time; what is found is complete, never older than reported."""
    rng = random.Random(0)
    started = time.perf_counter()
    write(tmp_path / "first", 0, size=20_000)
    folder = tmp_path / "run"
    folder.mkdir()
    save_time = time.perf_counter() - started
    step, killed_while_saving = 0, 0
    for _ in range(30):
        reports, sender = apart.Pipe(duplex=False)
        process = apart.Process(target=save_in_a_loop, args=(folder, step, sender))
        process.start()
        sender.close()
        assert reports.recv() == step  # it is up; the kill falls into one of the next saves
        time.sleep(rng.uniform(0.0, 5.0) * save_time)
        process.kill()
        process.join()
        reported = max([step, *received(reports)])
        killed_while_saving += any(name.startswith((".tmp", ".old")) for name in names(folder))
        found, passed_over = checkpoint.newest_complete(folder)
        assert passed_over == []
        if found is None:
            assert reported == 0
            continue
        loaded = checkpoint.read(found)
        assert loaded.step in (reported, reported + 1)
        assert_is_step(loaded, loaded.step)
        step = loaded.step
    assert step >= 15 and killed_while_saving >= 3  # or the trials showed nothing


def fill_the_disk(folder, limit, reports):
    write(folder, 1, size=1000)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        write(folder, 2, size=200_000)
    except CheckpointError as error:
        reports.send(str(error))


@pytest.mark.parametrize("how", ["file size limit", "small disk"])
def test_a_full_disk_leaves_the_older_checkpoint(tmp_path, how):
    """Row C41: the write fails with one clear error and nothing else changes."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    # a disk of its own needs root; the other case needs nothing
    mounted = how == "small disk" and mount_tmpfs(folder, kib=512)
    limit = 0 if mounted else 400_000
    try:
        reports, sender = apart.Pipe(duplex=False)
        process = apart.Process(target=fill_the_disk, args=(folder, limit, sender))
        process.start()
        sender.close()
        message = reports.recv()
        process.join()
        reason = "No space left on device" if mounted else "File too large"
        assert f"cannot write the checkpoint of step 2 to {folder / 'step_00000002'}" in message
        assert reason in message and f"the newest is {folder / 'step_00000001'}" in message
        assert names(folder) == ["step_00000001"]
        assert_is_step(checkpoint.read(folder / "step_00000001"), 1)
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


def mount_tmpfs(folder, kib):
    command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def test_views_and_strides_are_saved_by_value(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {"model": {"t": base.t(), "row": base[1], "all": base, "none": torch.empty(0)}}
    path = checkpoint.write(tmp_path, 1, tensors, {}, keep_last=1)
    loaded = checkpoint.read(path).tensors["model"]
    for name, tensor in tensors["model"].items():
        assert torch.equal(loaded[name], tensor)


# --- names --------------------------------------------------------------------------------------


class TrulyNamed(nn.Module):
    """Children whose own names are those of the wrappers."""

    def __init__(self):
        super().__init__()
        self._orig_mod = nn.Linear(2, 2)
        self.module = nn.Linear(2, 3)

    def forward(self, x):
        return self.module(self._orig_mod(x))


def tiny(seed=0, **overrides):
    torch.manual_seed(seed)
    return Transformer(Config.preset("tiny", **overrides))


def compile_blocks(model):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend="eager")
    return model


def wrap_blocks(model):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    return model


def ddp(model):
    return nn.parallel.DistributedDataParallel(model)


WRAPS = {
    "eager": lambda model: model,
    "xtrain": lambda model: xtrain.compile(model, backend="eager"),
    "DDP of xtrain": lambda model: ddp(xtrain.compile(model, backend="eager")),
    "compiled DDP": lambda model: torch.compile(ddp(model), backend="eager"),
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled blocks": compile_blocks,
    "checkpoint wrapper": wrap_blocks,
    "compiled checkpoint wrapper": lambda m: torch.compile(wrap_blocks(m), backend="eager"),
}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("mode", WRAPS)
def test_one_set_of_names_for_all_modes(tmp_path, mode, one_process):
    """Row C47: each saves what the plain model does, and loads that: so any pair fits together."""
    plain = tiny().state_dict()
    tensors, aliases = model_tensors(WRAPS[mode](tiny()))
    assert list(tensors) == list(plain) and aliases == {}
    path = checkpoint.write(tmp_path, 1, {"model": tensors}, {}, keep_last=1)
    loaded = checkpoint.read(path).tensors["model"]
    target = WRAPS[mode](tiny(seed=1))
    load_model_tensors(target, loaded)
    again, _ = model_tensors(target)
    for name, value in plain.items():
        assert torch.equal(loaded[name], value) and torch.equal(again[name], value)
    assert sorted(parameter_names(target).values()) == sorted(plain)


def test_a_child_truly_named_like_a_wrapper_keeps_its_name():
    keys = ["_orig_mod.weight", "_orig_mod.bias", "module.weight", "module.bias"]
    for wrap in (lambda m: m, lambda m: torch.compile(m, backend="eager"), nn.DataParallel):
        model = wrap(TrulyNamed())
        tensors, _ = model_tensors(model)
        assert list(tensors) == keys
        load_model_tensors(model, {k: torch.ones_like(v) for k, v in tensors.items()})
        assert all(torch.all(v == 1) for v in model.state_dict().values())
    tensors, _ = model_tensors(nn.Sequential(torch.compile(TrulyNamed(), backend="eager")))
    assert list(tensors) == [f"0.{key}" for key in keys]


@pytest.mark.parametrize(
    "prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."]
)
def test_files_with_old_prefixes_load(tmp_path, prefix):
    """Row C47: as nanoGPT and others saved from compiled and DDP models."""
    state = {prefix + name: tensor for name, tensor in tiny().state_dict().items()}
    save_file(state, tmp_path / "old.safetensors")
    model = tiny(seed=1)
    load_model_tensors(model, load_file(tmp_path / "old.safetensors"))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[prefix + name])


def test_a_tied_tensor_is_saved_once_and_stays_tied(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(4, 3)
            self.head = nn.Linear(3, 4, bias=False)
            self.head.weight = self.embedding.weight

    tensors, aliases = model_tensors(Tied())
    assert list(tensors) == ["embedding.weight"]
    assert aliases == {"head.weight": "embedding.weight"}
    model = Tied()
    load_model_tensors(model, tensors, aliases)
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.head.weight, tensors["embedding.weight"])
    tensors, aliases = model_tensors(tiny(tie_embeddings=True))
    assert "embedding.weight" in tensors and len(tensors) == 20 and aliases == {}


def test_weights_that_do_not_fit_are_named():
    tensors, _ = model_tensors(tiny())
    with pytest.raises(CheckpointError, match="missing: blocks.2.attention_norm.weight, .* and 6"):
        load_model_tensors(tiny(n_layers=3), tensors)
    with pytest.raises(CheckpointError, match="not in the model: blocks.1"):
        load_model_tensors(tiny(n_layers=1), tensors)
    shapes = r"feed_forward.gate.weight is \(32, 64\) in the checkpoint and \(32, 48\) here"
    with pytest.raises(CheckpointError, match=shapes):
        load_model_tensors(tiny(ffn_hidden=48), tensors)
    model = tiny(seed=1)
    before = model.norm.weight.clone()
    with pytest.raises(CheckpointError):
        load_model_tensors(model, {**tensors, "extra": torch.ones(1)})
    assert torch.equal(model.norm.weight, before)
