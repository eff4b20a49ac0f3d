"""What this command raises for what its user can change, and the check of MODEL; no torch."""

from __future__ import annotations

import difflib
from pathlib import Path

from xtrain.config import PRESETS, ConfigError, RunConfig


class ExplainError(ConfigError):
    """A model that cannot be found, built or run, or that has no residual site."""


def kind_of(model: str) -> str:
    """Return what MODEL names: a "preset", a "run", a "folder" of Hugging Face, or a "function".

    Raises:   ExplainError if it is none of them.
    """
    path = Path(model)
    if model in PRESETS:
        return "preset"
    if run_path(model) is not None:
        return "run"
    if path.exists():
        if path.is_file() and path.name != "config.json":
            raise ExplainError(
                f"{model!r} is a file; MODEL is a Hugging Face config folder, or module:function "
                f"for a function of a Python module ({path.stem}:NAME)"
            )
        folder = path if path.is_dir() else path.parent
        if not (folder / "config.json").is_file():
            raise ExplainError(
                f"no config.json in {folder}, nor a run's config.toml; MODEL is a Hugging Face "
                "config folder or the folder of a run"
            )
        return "folder"
    if ":" in model and "/" not in model:
        return "function"
    close = difflib.get_close_matches(model, PRESETS, n=1)
    advice = f"; did you mean {close[0]}?" if close else ""
    raise ExplainError(
        f"{model!r} is no preset ({', '.join(PRESETS)}), no run, no folder with a Hugging Face "
        f"config.json and no module:function{advice}"
    )


def run_path(model: str) -> Path | None:
    """Return the folder of the run that MODEL names, by its path or in runs/; None if none."""
    for path in (Path(model), Path(RunConfig().run.folder) / model):
        if (path / "config.toml").is_file() and not (path / "config.json").is_file():
            return path
    return None
