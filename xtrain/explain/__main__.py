"""The command: `python -m xtrain.explain MODEL`."""

from __future__ import annotations

import sys

from xtrain.explain.command import main

if __name__ == "__main__":
    sys.exit(main())
