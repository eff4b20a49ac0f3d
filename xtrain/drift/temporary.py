"""The folder that a record is written into, beside its name; and those that killed ones left.

Every recording holds a lock on its folder, which ends with its process. A process id would say
less: it may be another's by now, or one of another machine or container.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

try:
    import fcntl
except ImportError:  # no locks: nothing of others is ever removed
    fcntl = None  # type: ignore[assignment]

FREE, HELD, UNKNOWN = "free", "held", "unknown"  # whether a folder can be locked


class TemporaryFolder:
    """`.NAME.tmp-PID` beside NAME; made anew, after those of recordings that are dead are gone."""

    def __init__(self, target: Path):
        """Make it. Raises: OSError."""
        self.path = target.with_name(f".{target.name}.tmp-{os.getpid()}")
        self._lock: int | None = None
        remove_dead(target)
        self.path.mkdir(parents=True)
        self._lock, _ = _try_lock(self.path)

    def release(self) -> None:
        """Give up the lock: the folder has its name, or is gone."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_dead(target: Path) -> None:
    """Remove the folders for a record of this name that no process is writing into."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.tmp-(\d+)(-old)?")
    try:
        beside = list(target.parent.iterdir())
    except OSError:  # not there yet, or nobody may look: nothing to remove
        return
    for path in beside:
        match = pattern.fullmatch(path.name)
        if match is None or not path.is_dir() or path.is_symlink():
            continue
        lock, state = _try_lock(path)
        # where the file system has no locks, this process's own name is still its own
        if state == FREE or state == UNKNOWN and match[1] == str(os.getpid()):
            shutil.rmtree(path, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _try_lock(path: Path) -> tuple[int | None, str]:
    """Return (descriptor that holds the lock until it is closed, FREE), or (None, why not)."""
    if fcntl is None:
        return None, UNKNOWN
    descriptor = None
    try:
        descriptor = os.open(path, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if descriptor is not None:
            os.close(descriptor)
        return None, HELD if isinstance(error, BlockingIOError) else UNKNOWN
    return descriptor, FREE
