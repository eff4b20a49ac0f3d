"""What can be wrong with a drift command's input; the message is one line that says what to do."""

from __future__ import annotations


class DriftError(ValueError):
    """A record, a model, a flag or a file that cannot be used: exit code 5."""
