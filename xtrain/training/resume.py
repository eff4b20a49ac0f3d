"""Which checkpoint a run continues from, and what may change on the way."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from xtrain import checkpoint
from xtrain.config import ConfigError, RunConfig
from xtrain.data import Corpus
from xtrain.strict_read import Check, check_fields, is_count, is_object, is_text
from xtrain.training.run_folder import RunFolder

log = logging.getLogger(__name__)

# A checkpoint means nothing under another shape, and its position nothing in another order of data.
_FREE_IN_MODEL = {"model.dropout", "model.recompute"}
_FIXED = {"data.val_fraction", "train.seq_len", "train.batch_size", "train.seed"}
# Said by the fingerprint of the data, or of no consequence for the numbers.
_SILENT = {"data.paths", "data.cache_dir", "data.tokenizer", "run.name", "run.folder"}


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
    """A run and its newest complete checkpoint."""

    run: RunFolder
    saved: checkpoint.Checkpoint

    @classmethod
    def open(cls, run: RunFolder) -> ResumePoint:
        """Read the newest complete checkpoint of a run, saying which newer ones are damaged.

        Raises: ConfigError if there is none.
        """
        saved = newest_checkpoint(run, "to resume from")
        for _ in run.read_metrics():  # a damaged file is refused before anything is written
            pass
        return cls(run, saved)

    def check_config(self, config: RunConfig) -> None:
        """Refuse what a checkpoint cannot be continued with; say what else has changed.

        config: resolved, every field of [model] written out.
        """
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

    def check_data(self, corpus: Corpus) -> None:
        """Refuse data that are not those of the checkpoint."""
        if corpus.fingerprint != self.saved.state["data"]["fingerprint"]:
            raise ConfigError(
                f"the data or the tokenizer are not those of {self.saved.path}: files have changed "
                "since, or --data names others; start a new run for them"
            )


def _flat(config: RunConfig) -> dict[str, object]:
    return {
        f"{s}.{key}": value for s, table in config.to_dict().items() for key, value in table.items()
    }
