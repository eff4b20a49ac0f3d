"""Where a run continues, and what may change on the way."""

from __future__ import annotations

import glob
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xtrain import checkpoint
from xtrain.config import ConfigError, RunConfig
from xtrain.data import Corpus
from xtrain.data.sources import HF_PREFIX
from xtrain.data.tokenizer import names_file
from xtrain.files import Check, check_fields, is_count, is_object, is_text
from xtrain.optim import Schedule
from xtrain.training.run_folder import RunFolder

log = logging.getLogger(__name__)

# A checkpoint means nothing under another shape, and its position nothing in another order of data.
_FREE_IN_MODEL = {"model.dropout", "model.recompute"}
_FIXED = {"data.val_fraction", "train.seq_len", "train.batch_size", "train.seed"}
# Said by the fingerprint of the data, or of no consequence for the numbers.
_SILENT = {"data.paths", "data.cache_dir", "data.tokenizer", "run.name", "run.folder"}
_SILENT |= {"run.dump_graphs"}


def _is_texts(value: Any) -> bool:
    return is_object(value) and all(map(is_text, value.values()))


# What a trainer has written into state.json, beside what every checkpoint has.
STATE: dict[str, Check] = {
    "model": is_object,
    "config": is_object,
    "data": is_object,
    "aliases": _is_texts,
}
DATA: dict[str, Check] = {"fingerprint": is_text, "tokens": is_count}


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
    saved = checkpoint.read(path)
    try:
        check_fields(saved.state, STATE)
        check_fields(saved.state["data"], DATA, "data.")
        check_fields(saved.tensors, {"model": is_object, "optimizer": is_object, "rng": is_object})
    except ValueError as error:
        raise checkpoint.CheckpointError(f"{path} is damaged: {error}") from None
    return saved


@dataclass(frozen=True)
class ResumePoint:
    """A run and its newest complete checkpoint; none: it ended before there was one."""

    run: RunFolder
    saved: checkpoint.Checkpoint | None

    @classmethod
    def open(cls, run: RunFolder) -> ResumePoint:
        """Read the newest complete checkpoint of a run, saying which newer ones are damaged.

        Raises: CheckpointError if there are some and none can be used.
        """
        saved = None
        if checkpoint.steps(run.checkpoints):
            saved = newest_checkpoint(run, "to resume from")
        for _ in run.read_metrics():  # a damaged file is refused before anything is written
            pass
        if saved is None:
            log.info("%s has no checkpoint yet: starting at step 0", run.path)
        return cls(run, saved)

    def tokenizer(self, config: RunConfig) -> str:
        """Return the name of the tokenizer to read: the run's own copy, unless another is asked.

        The file that the run was started with may have moved, or changed.
        """
        asked = config.data.tokenizer
        whole = self.run.tokenizer.is_file() and self.run.special_tokens.is_file()
        same = asked == RunConfig.load(self.run.config).data.tokenizer
        return str(self.run.tokenizer) if whole and same else asked

    def check_paths(self, config: RunConfig) -> None:
        """Refuse files that are not there, with what to pass for them."""
        tokenizer = self.tokenizer(config)
        named = [("--tokenizer", tokenizer)] if names_file(tokenizer) else []
        named += [
            ("--data", name)
            for name in config.data.paths
            if not name.startswith(HF_PREFIX) and not glob.has_magic(name)
        ]
        for flag, name in named:
            if not os.path.lexists(name):
                raise ConfigError(
                    f"{name} does not exist, which {self.run.path} is trained with: pass {flag} "
                    f"with where it lies now, relative to {Path.cwd()}; its content must be the "
                    "same"
                )

    def check_config(self, config: RunConfig) -> None:
        """Refuse what a checkpoint cannot be continued with; say what else has changed.

        config: resolved, every field of [model] written out.
        """
        if self.saved is None:  # from the first step on, anything may be another
            return
        saved = RunConfig.from_dict(self.saved.state["config"], source=str(self.saved.path))
        before, after = _flat(saved), _flat(config)
        changed = [
            name for name in sorted({*before, *after}) if before.get(name) != after.get(name)
        ]
        for name in changed:
            old, new = before.get(name, "none"), after.get(name, "none")
            fixed = name in _FIXED or (name.startswith("model.") and name not in _FREE_IN_MODEL)
            if fixed:
                raise ConfigError(
                    f"{name} cannot change on resume: it is {old} in {self.saved.path}, and {new} "
                    "was asked for; start a new run for that"
                )
            if name not in _SILENT:
                log.info("changed since the checkpoint: %s %s -> %s", name, old, new)
        steps = config.train.steps or 0
        if steps <= self.saved.step:
            raise ConfigError(
                f"{self.run.path} has already done {self.saved.step} steps of {steps}; ask for "
                "more with --steps"
            )
        _say_schedule(saved, config, self.saved.step)

    def check_data(self, corpus: Corpus) -> None:
        """Refuse data that are not those of the checkpoint."""
        if self.saved and corpus.fingerprint != self.saved.state["data"]["fingerprint"]:
            raise ConfigError(
                f"the data or the tokenizer are not those of {self.saved.path}: files have changed "
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


def _flat(config: RunConfig) -> dict[str, object]:
    return {
        f"{s}.{key}": value for s, table in config.to_dict().items() for key, value in table.items()
    }
