"""What this command raises for what its user can change, and the check of MODEL; no torch."""

from __future__ import annotations

import difflib
from pathlib import Path

from xtrain.config import PRESETS, ConfigError


class ExplainError(ConfigError):
    """A model that cannot be found, built or run, or that has no residual site."""


def kind_of(model: str) -> str:
    """Return what MODEL names: a "preset", a "folder" of Hugging Face, or a "function".

    Raises:   ExplainError if it is none of them.
    """
    path = Path(model)
    if model in PRESETS:
        return "preset"
    if path.exists():
        if path.is_file() and path.name != "config.json":
            raise ExplainError(
                f"{model!r} is a file; MODEL is a Hugging Face config folder, or module:function "
                f"for a function of a Python module ({path.stem}:NAME)"
            )
        folder = path if path.is_dir() else path.parent
        if not (folder / "config.json").is_file():
            raise ExplainError(f"no config.json in {folder}; MODEL is a Hugging Face config folder")
        return "folder"
    if ":" in model and "/" not in model:
        return "function"
    close = difflib.get_close_matches(model, PRESETS, n=1)
    advice = f"; did you mean {close[0]}?" if close else ""
    raise ExplainError(
        f"{model!r} is no preset ({', '.join(PRESETS)}), no folder with a Hugging Face config.json "
        f"and no module:function{advice}"
    )
