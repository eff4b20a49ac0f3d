"""Small training runs for the tests: a corpus, a model that traces in a moment, the command."""

from __future__ import annotations

import json
import logging
import multiprocessing
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from xtrain import checkpoint, train

TINY = (
    "--preset=tiny",
    "--set=model.n_layers=1",
    "--set=train.seq_len=16",
    "--set=train.batch_size=4",
    "--set=train.sample_tokens=0",
    "--set=train.eval_interval=0",
)
# Two micro-batches a step and dropout: what a resume could lose is in use.
FLAGS = ("--dropout=0.3", "--set=train.micro_batch_size=2", "--set=optim.schedule_steps=10")

# Starts processes that have never computed, at the cost of a fork: a server has imported for them.
apart = multiprocessing.get_context("forkserver")
apart.set_forkserver_preload(
    [
        "pytest",
        "torch._dynamo",
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "xtrain.training.loop",
    ]
)


def write_corpus(folder: Path) -> Path:
    """Text with something to learn: lines of counting words in a fixed order of seeds."""
    words = "zero one two three four five six seven eight nine".split()
    rng = np.random.default_rng(0)
    lines = []
    for start in rng.integers(0, 10, 200):
        lines.append(" ".join(words[(start + i) % 10] for i in range(8)))
    path = folder / "corpus.txt"
    path.write_text("\n".join(lines))
    return path


class Runner:
    """Runs the training command in a folder of its own, which holds the data and their cache."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.corpus = write_corpus(folder)

    def arguments(self, *extra: str) -> list[str]:
        return [
            *TINY,
            f"--data={self.corpus}",
            f"--set=data.cache_dir={self.folder / 'cache'}",
            f"--set=run.folder={self.folder / 'runs'}",
            *extra,
        ]

    def __call__(self, *extra: str) -> int:
        return train.main(self.arguments(*extra))

    def run(self, name: str) -> Path:
        return self.folder / "runs" / name

    def take(self, run: Path) -> Path:
        """Copy a run from elsewhere into the folder, under its name."""
        return shutil.copytree(run, self.run(run.name))

    def resume(self, name: str, *extra: str) -> int:
        return self(*extra, f"--resume={self.run(name)}")

    def newest(self, name: str) -> checkpoint.Checkpoint:
        path, _ = checkpoint.newest_complete(self.run(name) / "checkpoints")
        return checkpoint.read(path)

    def records(self, name: str) -> list[dict]:
        lines = (self.run(name) / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def losses(self, name: str) -> list[float]:
        return [record["loss"] for record in self.records(name)]


@contextmanager
def running(folder: Path) -> Iterator[Runner]:
    """Give a Runner, and put back what the command changes in its process.

    One thread: no operation here is large enough to share, and tests run side by side.
    """
    threads, show, handlers = torch.get_num_threads(), warnings.showwarning, _logger().handlers
    torch.set_num_threads(1)
    try:
        yield Runner(folder)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
        warnings.showwarning = show
        _logger().handlers = handlers
        _logger().propagate = True


def no_steps(trainer, stop, watcher, write) -> None:
    """In the place of Trainer._loop: the run's records and checkpoint, and nothing computed."""
    for step in range(trainer.first_step, trainer.steps):
        record = {"step": step, "loss": 1.0, "learning_rate": trainer.schedule(step)}
        write({**record, "grad_norm": 1.0, "step_time_ms": 1.0, "tokens_per_s": 1.0})
    trainer.saver.save(trainer.steps, trainer.num_tokens)


def assert_same_end(runner: Runner, name: str, other: str = "straight") -> None:
    """Every step's losses, rates and norms; weights, moments and generators at the end."""
    for key in ("step", "loss", "learning_rate", "grad_norm", "tokens"):
        values = [[record[key] for record in runner.records(n)] for n in (name, other)]
        assert values[0] == values[1], key
    ours, theirs = runner.newest(name), runner.newest(other)
    assert ours.step == theirs.step == 10
    assert ours.state["data"] == theirs.state["data"]
    for group, tensors in theirs.tensors.items():
        assert ours.tensors[group].keys() == tensors.keys()
        for key, tensor in tensors.items():
            assert torch.equal(ours.tensors[group][key], tensor), (group, key)


def error_of(capsys: pytest.CaptureFixture) -> str:
    """The last line of stderr: all that a mistake says."""
    return capsys.readouterr().err.splitlines()[-1]


def _logger() -> logging.Logger:
    return logging.getLogger("xtrain")
