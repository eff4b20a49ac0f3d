"""What can be wrong with a drift command's input; the message is one line that says what to do."""

from __future__ import annotations

BAD_INPUT = 5  # an exit code that is no verdict


class DriftError(ValueError):
    """A record, a model, a flag or a file that cannot be used: exit code 5."""


def missing_package(error: ModuleNotFoundError) -> str:
    """Return what to do about an import that failed. Raises: the error, for a module of ours."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "xtrain"):
        raise error
    return f"this needs the package {package}; install it"
