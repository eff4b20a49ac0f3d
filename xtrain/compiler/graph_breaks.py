"""Where Dynamo broke the graphs of a model, why, and what to do about each kind of break."""

from __future__ import annotations

import linecache
import re
from dataclasses import dataclass

from xtrain import torch_compat
from xtrain.passes.graph import short_place

_MAX_BREAKS = 3
_MAX_LINES_ABOVE = 10
_RANDOM = re.compile(r"\b(rand\w*|random\w*|uniform\w*|bernoulli\w*)\b")
# How Dynamo's reasons begin, or what they hold, where code depends on the value of a tensor.
_BY_VALUE = re.compile(
    r"generic_jump|data[- ]dependent|Dynamic shape operator|\.item\(\)|local_scalar_dense", re.I
)
BY_CHANCE = (
    "What runs there is decided at random, which no graph can hold (layer drop: set its probability"
    " to 0 before the model is built, in transformers config.layerdrop, encoder_layerdrop and "
    "decoder_layerdrop; a step that leaves a layer out has fewer sites than another)"
)
_VALUES = (
    "Write that part without sizes and branches that depend on values (experts as grouped or "
    "batched products; in transformers models that take it experts_implementation='batched_mm', or "
    "'grouped_mm' on bfloat16 weights)"
)


@dataclass(frozen=True)
class Break:
    """One place where a graph broke: file and line, its code, and Dynamo's reason."""

    place: str
    reason: str

    @property
    def code(self) -> str:
        """The line of code, "" where the source is not there."""
        file, _, line = self.place.rpartition(":")
        return linecache.getline(file, int(line)).strip() if line.isdigit() else ""

    @property
    def is_random(self) -> bool:
        """Whether the code, or an assignment above it to one of its names, draws a number.

        Dynamo's reason shows how a condition was computed where it gives up the whole function.
        """
        if _RANDOM.search(self.code) or _RANDOM.search(self._why):
            return True
        file, _, line = self.place.rpartition(":")
        names = set(re.findall(r"[A-Za-z_]\w*", self.code))
        number = int(line) if line.isdigit() else 0
        for above in range(max(1, number - _MAX_LINES_ABOVE), number):
            name, is_assigned, value = linecache.getline(file, above).partition("=")
            if is_assigned and name.strip() in names and _RANDOM.search(value):
                return True
        return False

    @property
    def is_by_value(self) -> bool:
        """Whether a tensor's value decides what runs, or how large a result is."""
        return _BY_VALUE.search(self._why) is not None

    @property
    def _why(self) -> str:
        return self.reason.partition("Hint:")[0]

    def __str__(self) -> str:
        why = self.reason.strip().partition("\n")[0].rstrip(":")
        code = f": `{self.code}`" if self.code else ""
        return f"{short_place(self.place)} ({why}{code})"


def breaks_since(num_before: int) -> list[Break]:
    """Return the breaks behind the first `num_before`; all of them if Dynamo began anew."""
    breaks = torch_compat.graph_breaks()
    breaks = breaks[num_before if num_before <= len(breaks) else 0 :]
    return list(dict.fromkeys(Break(place, reason) for place, reason in breaks))


def breaks_said(num_before: int) -> str:
    """Return a sentence on the breaks, and one on what to do about them, "" if there are none."""
    breaks = breaks_since(num_before)
    said = list(dict.fromkeys(map(str, breaks)))
    if not said:
        return ""
    if len(said) > 2 * _MAX_BREAKS:  # the cause is among the first, and what cut this add the last
        said[_MAX_BREAKS:-_MAX_BREAKS] = [f"{len(said) - 2 * _MAX_BREAKS} more"]
    by_chance = [b for b in breaks if b.is_random]
    others = [b for b in breaks if not b.is_random]
    advice = [BY_CHANCE] if by_chance else []
    advice += [_VALUES] if any(b.is_by_value for b in others) else []
    unnamed = [b for b in others if not b.is_by_value]
    advice += [_explained(unnamed[0])] if unnamed and not advice else []
    return f"The graph broke at {'; '.join(said)}. {'. '.join(advice)}"


def _explained(found: Break) -> str:
    explanation = re.search(r"Explanation: ([^\n]*)", found.reason)
    says = f" (Dynamo: {explanation[1].rstrip('.')})" if explanation else ""
    return f"Take out what breaks it{says}"
