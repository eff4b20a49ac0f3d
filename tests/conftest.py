"""Shared fixtures: fixed seeds, the devices a test runs on, and what becomes of `gpu` tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

HAS_CUDA = torch.cuda.is_available()


def pytest_configure(config: pytest.Config) -> None:
    """Divide the cores among xdist workers: threads that wait for a core spin (50 x slower).

    The commands that tests run are told by OMP_NUM_THREADS.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        threads = max(1, torch.get_num_threads() // workers)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if HAS_CUDA:
        return
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items:
        config.hook.pytest_deselected(items=gpu_items)
        items[:] = [item for item in items if item not in set(gpu_items)]


def pytest_report_header() -> str:
    gpu = "run" if HAS_CUDA else "are deselected: torch finds no CUDA device"
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads; gpu tests {gpu}"


@pytest.fixture(autouse=True)
def fixed_seeds():
    """Every test starts from the same random state and leaves no compiled code behind.

    Without the reset a test's number of recompilations would depend on the tests before it.
    """
    torch.manual_seed(0)
    np.random.seed(0)
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device in turn; the CUDA half carries the `gpu` marker."""
    return torch.device(request.param)


# --- training runs --------------------------------------------------------------------------------


@pytest.fixture
def runner(tmp_path: Path) -> Iterator:
    """The training command in a folder of its own."""
    from training import running

    with running(tmp_path) as runner:
        yield runner


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command does everything but the steps: for what does not depend on their numbers."""
    from training import no_steps

    monkeypatch.setattr("xtrain.training.loop.Trainer._loop", no_steps)


@pytest.fixture(scope="session")
def trained_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs to copy: `straight` has done ten steps, `started` two."""
    from training import FLAGS, running

    with running(tmp_path_factory.mktemp("trained")) as runner:
        for name, steps in (("straight", 10), ("started", 2)):
            assert runner(f"--name={name}", f"--steps={steps}", *FLAGS) == 0
    return runner.folder / "runs"


@pytest.fixture
def straight(runner, trained_runs: Path) -> Path:
    """A run of ten steps, which the others are held to."""
    return runner.take(trained_runs / "straight")


@pytest.fixture
def started(runner, trained_runs: Path) -> Path:
    """A run of two steps, to go on from."""
    return runner.take(trained_runs / "started")
