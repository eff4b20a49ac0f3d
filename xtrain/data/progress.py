"""A progress bar on a terminal, single lines everywhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


class Progress:
    """Where slow work reports: standard error, or nowhere."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled

    def say(self, line: str) -> None:
        """Print one line."""
        if self.enabled:
            print(line, file=sys.stderr, flush=True)

    @contextmanager
    def bar(self, label: str, num_bytes: int | None) -> Iterator[Callable[[int], None]]:
        """Show bytes done out of num_bytes while the block runs; gives the function to report to.

        tqdm's disable=None: no bar where standard error is not a terminal.
        """
        with tqdm(
            total=num_bytes,
            desc=label,
            unit="B",
            unit_scale=True,
            disable=None if self.enabled else True,
            leave=False,
        ) as bar:
            yield bar.update
