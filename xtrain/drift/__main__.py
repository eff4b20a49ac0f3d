"""The command: `python -m xtrain.drift record | compare | ops | bisect`."""

from __future__ import annotations

import sys

from xtrain.drift.command import main

if __name__ == "__main__":
    sys.exit(main())
