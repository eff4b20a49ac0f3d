"""The command: `python -m xtrain.drift record | compare | ops | bisect`."""

from __future__ import annotations

import sys

from xtrain.drift.settings import BAD_INPUT, missing_package


def run() -> int:
    """Return the exit code; where NumPy is missing as well, Python's own 1 would be a verdict."""
    try:
        from xtrain.drift.cli import main
    except ModuleNotFoundError as error:
        print(f"error: {missing_package(error)}", file=sys.stderr)
        return BAD_INPUT
    return main()


if __name__ == "__main__":
    sys.exit(run())
