"""What a user says of single sums: `sums={"layers.*.mixer": "leave", "model.py:57": "drop"}`.

A place is the path of the module whose code adds, as reports name it, or its file and line. In a
path `*` stands for anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import fx

from xtrain import torch_compat
from xtrain.passes.graph import module_path


class SettledSums:
    """Look up what was said of a sum, and which of the user's places no sum has matched."""

    def __init__(self, sums: Mapping[str, str]):
        self._sums = dict(sums)
        self._unmatched = dict.fromkeys(sums)

    def __bool__(self) -> bool:
        return bool(self._sums)

    def __call__(self, node: fx.Node) -> str:
        """Return "drop", "leave" or "" for a sum of a graph."""
        if not self._sums:
            return ""
        path, line = plain_path(node), line_of(node)
        for place, said in self._sums.items():
            file, _, number = place.rpartition(":")
            if number.isdigit() and file:
                is_here = f"/{line}".endswith(f"/{place}")
            else:
                is_here = fnmatchcase(path, place)
            if is_here:
                self._unmatched.pop(place, None)
                return said
        return ""

    @property
    def unmatched(self) -> list[str]:
        """The places that no sum has matched so far."""
        return list(self._unmatched)


def plain_path(node: fx.Node) -> str:
    """Return the path of the module whose code a node was traced from, as a user writes it."""
    path = module_path(node)
    for root in ("L['_xtrain_model']", "L['self']"):
        path = path.removeprefix(root)
    return path.removeprefix(".")


def line_of(node: fx.Node) -> str:
    """Return "file:line" of the code that a node was traced or recorded from, "" if unknown."""
    if "place" in node.meta:
        return str(node.meta["place"]).partition(" in ")[0]
    traced = torch_compat.frames(str(node.meta.get("stack_trace") or ""))
    return "" if not traced else ":".join(traced[-1])
