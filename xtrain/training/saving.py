"""What a checkpoint of a run holds, and how the run goes on from one: what may change on the way.

xtrain.checkpoint writes and reads the files. Here alone is said what they mean: weights, moments,
generators, and the position in the data, which is a number of steps.
"""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xtrain import checkpoint
from xtrain.checkpoint import load_model_tensors, model_tensors, parameter_names
from xtrain.config import ConfigError, RunConfig
from xtrain.data.corpus import Corpus
from xtrain.data.sources import HF_PREFIX
from xtrain.data.tokenizer import names_file
from xtrain.files import Form, check_fields, is_count, is_object, is_text
from xtrain.model import Transformer
from xtrain.training.run_folder import RunFolder
from xtrain.training.update import Schedule, load_named_state, named_state

log = logging.getLogger(__name__)

# A checkpoint means nothing under another shape, and its position nothing in another order of data.
_FREE_IN_MODEL = {"model.dropout", "model.recompute"}
_FIXED = {"data.val_fraction", "train.seq_len", "train.batch_size", "train.seed"}
# Said by the fingerprint of the data, or of no consequence for the numbers.
_SILENT = {"data.paths", "data.cache_dir", "data.tokenizer", "run.name", "run.folder"}
_SILENT |= {"run.dump_graphs"}


def _is_texts(value: Any) -> bool:
    return is_object(value) and all(map(is_text, value.values()))


# What a trainer has written into state.json, beside what every checkpoint has, and its tensors.
_STATE: dict[str, Form] = {
    "model": is_object,
    "config": is_object,
    "data": {"fingerprint": is_text, "tokens": is_count},
    "aliases": _is_texts,
}
_TENSORS: dict[str, Form] = {"model": is_object, "optimizer": is_object, "rng": is_object}


@dataclass
class Saver:
    """Writes the checkpoints of a run, and puts one back."""

    run: RunFolder
    config: RunConfig
    model: Transformer  # the plain one, under whose names all is saved
    optimizer: torch.optim.Optimizer
    fingerprint: str  # of the corpus
    versions: Mapping[str, str]
    saved_step: int | None = None

    def __post_init__(self) -> None:
        self.names = parameter_names(self.model)
        self.device = torch.device(self.config.run.device)

    def save(self, step: int, num_tokens: int) -> None:
        """Write the checkpoint of `step` finished steps, num_tokens targets in all of them.

        Raises: CheckpointError when it cannot be written; older ones are intact.
        """
        tensors, aliases = model_tensors(self.model)
        state = {
            "model": self.model.config.to_dict(),
            "config": self.config.to_dict(),
            "data": {
                "fingerprint": self.fingerprint,
                "next_sample": step * (self.config.train.batch_size or 0),
                "tokens": num_tokens,
            },
            "aliases": aliases,
            "versions": dict(self.versions),
        }
        groups = {
            "model": tensors,
            "optimizer": named_state(self.optimizer, self.names),
            "rng": self._generators(),
        }
        keep_last = self.config.checkpoint.keep_last
        checkpoint.write(self.run.checkpoints, step, groups, state, keep_last=keep_last)
        self.saved_step = step

    def restore(self, saved: checkpoint.Checkpoint) -> int:
        """Continue from a checkpoint; return the targets that counted in its steps.

        A run that changes its device keeps the CPU's generator alone.
        """
        load_model_tensors(self.model, saved.tensors["model"], saved.state["aliases"])
        try:
            load_named_state(self.optimizer, self.names, saved.tensors["optimizer"])
            states = saved.tensors["rng"]
            torch.set_rng_state(states["cpu"])
            if self.device.type == "cuda" and "cuda" in states:
                torch.cuda.set_rng_state(states["cuda"], self.device)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise checkpoint.CheckpointError(
                f"{saved.path} is damaged: its optimiser or generators cannot be restored ({error})"
            ) from error
        self.saved_step = saved.step
        return saved.state["data"]["tokens"]

    def _generators(self) -> dict[str, Tensor]:
        """Nothing of xtrain draws from them after the weights; what a user adds may."""
        states = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self.device)
        return states

    @property
    def how_to_resume(self) -> str:
        """A sentence on how a run that ended early goes on."""
        if self.saved_step is None:
            return f"No checkpoint was written; start it again with: {self.run.resume_command}"
        return (
            f"The last checkpoint, after step {self.saved_step} of {self.config.train.steps}, is "
            f"in {self.run.checkpoints}; continue with: {self.run.resume_command}"
        )


def newest_checkpoint(run: RunFolder, purpose: str) -> checkpoint.Checkpoint:
    """Return a run's newest complete checkpoint; a warning names each damaged one after it.

    purpose: "to resume from", say.
    Raises:  ConfigError if there is none, CheckpointError if it is no trainer's.
    """
    path, passed_over = checkpoint.newest_complete(run.checkpoints)
    if path is None:
        reasons = "; ".join(passed_over) or "start a new run"
        raise ConfigError(f"{run.path} has no complete checkpoint {purpose}; {reasons}")
    for reason in passed_over:
        log.warning("passed over the checkpoint %s; using %s", reason, path.name)
    saved = checkpoint.read(path, is_complete=True)
    try:
        check_fields(saved.state, _STATE)
        check_fields(saved.tensors, _TENSORS)
    except ValueError as error:
        raise checkpoint.CheckpointError(f"{path} is damaged: {error}") from None
    return saved


def checkpoint_to_resume(run: RunFolder) -> checkpoint.Checkpoint | None:
    """Return a run's newest complete checkpoint; None: it ended before there was one.

    Raises: CheckpointError if there are some and none can be used.
    """
    saved = None
    if checkpoint.steps(run.checkpoints):
        saved = newest_checkpoint(run, "to resume from")
    for _ in run.read_metrics():  # a damaged file is refused before anything is written
        pass
    if saved is None:
        log.info("%s has no checkpoint yet: starting at step 0", run.path)
    return saved


def tokenizer_to_resume(run: RunFolder, config: RunConfig) -> str:
    """Return the name of the tokenizer to read: the run's own copy, unless another is asked.

    The file that the run was started with may have moved, or changed.
    Raises: ConfigError for files that are not there, with what to pass for them.
    """
    tokenizer = config.data.tokenizer
    whole = run.tokenizer.is_file() and run.special_tokens.is_file()
    if whole and tokenizer == RunConfig.load(run.config).data.tokenizer:
        tokenizer = str(run.tokenizer)
    named = [("--tokenizer", tokenizer)] if names_file(tokenizer) else []
    named += [
        ("--data", name)
        for name in config.data.paths
        if not name.startswith(HF_PREFIX) and not glob.has_magic(name)
    ]
    for flag, name in named:
        if not os.path.lexists(name):
            raise ConfigError(
                f"{name} does not exist, which {run.path} is trained with: pass {flag} with where "
                f"it lies now, relative to {Path.cwd()}; its content must be the same"
            )
    return tokenizer


def check_config(run: RunFolder, saved: checkpoint.Checkpoint, config: RunConfig) -> None:
    """Refuse what a checkpoint cannot be continued with; say what else has changed.

    config: resolved, every field of [model] written out.
    """
    saved_config = RunConfig.from_dict(saved.state["config"], source=str(saved.path))
    before, after = saved_config.flat(), config.flat()
    for name in sorted({*before, *after}):
        old, new = before.get(name, "none"), after.get(name, "none")
        if old == new:
            continue
        if name in _FIXED or (name.startswith("model.") and name not in _FREE_IN_MODEL):
            raise ConfigError(
                f"{name} cannot change on resume: it is {old} in {saved.path}, and {new} was "
                "asked for; start a new run for that"
            )
        if name not in _SILENT:
            log.info("changed since the checkpoint: %s %s -> %s", name, old, new)
    steps = config.train.steps or 0
    if steps <= saved.step:
        raise ConfigError(
            f"{run.path} has already done {saved.step} steps of {steps}; ask for more with --steps"
        )
    _say_schedule(saved_config, config, saved.step)


def check_data(saved: checkpoint.Checkpoint, corpus: Corpus) -> None:
    """Refuse data that are not those of the checkpoint."""
    if corpus.fingerprint != saved.state["data"]["fingerprint"]:
        raise ConfigError(
            f"the data or the tokenizer are not those of {saved.path}: files have changed "
            "since, --data or --tokenizer names others, or an older xtrain tokenised long "
            "documents otherwise; start a new run for them"
        )


def _say_schedule(before: RunConfig, after: RunConfig, step: int) -> None:
    """Say by which schedule a run goes on, where that is another than it had."""
    old = Schedule.from_config(before.optim, before.train.steps or 0)
    new = Schedule.from_config(after.optim, after.train.steps or 0)
    if old != new and old(step) != new(step):
        log.info(
            "learning rate: the schedule is now that of %d steps, %s; step %d has %.3g, and had "
            "%.3g by the schedule of %d steps (optim.schedule_steps keeps or sets its length)",
            new.total_steps,
            "stretched" if new.total_steps > old.total_steps else "set anew",
            step,
            new(step),
            old(step),
            old.total_steps,
        )
