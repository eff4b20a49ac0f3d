"""Which values the flags of record can have, whatever the model; no torch here.

record asks before it loads a model, bisect before it starts the first of its children.
"""

from __future__ import annotations

import argparse
from typing import Any

from xtrain.drift.errors import DriftError

DTYPES = ("fp32", "bf16", "fp16")
MODES = ("eager", "aot_eager", "inductor")
DECODERS = ("greedy", "generate", "sample")
MINIMA = {
    "seed": 0,
    "sample-seed": 0,
    "num-prompts": 1,
    "prompt-length": 1,
    "tokens": 0,
    "batch": 1,
    "threads": 1,
    "warm-up": 0,
    "op-steps": 0,
    "top-k": 1,
}
MAXIMA = {"threads": 1024}  # torch ends the process where the system refuses it a thread
WORDS = {"mode": MODES, "dtype": ("auto", *DTYPES), "decode": DECODERS}


def check_flags(args: argparse.Namespace) -> None:
    """Raise DriftError for the first flag of record whose value no model could make right."""
    for flag in (*MINIMA, "pad-to", *WORDS, "device"):
        value = getattr(args, flag.replace("-", "_"))
        if value is not None:
            check_flag(flag, value)


def check_flag(flag: str, value: Any) -> None:
    """Raise DriftError for a value that a flag cannot have; text stands for a number."""
    if flag in MINIMA:
        _check_minimum(flag, value)
    elif flag in WORDS and value not in WORDS[flag]:
        known = ", ".join(WORDS[flag])
        raise DriftError(f"--{flag} must be one of {known}, got {value!r}")
    elif flag == "pad-to" and value != "auto" and not str(value).isdecimal():
        raise DriftError(f"--pad-to must be a number of tokens or auto, got {value!r}")
    elif flag == "device":
        kind, colon, number = value.partition(":")
        if kind not in ("cpu", "cuda") or colon and (kind == "cpu" or not number.isdecimal()):
            raise DriftError(f"--device must be cpu, cuda or cuda:N, got {value!r}")


def _check_minimum(flag: str, value: Any) -> None:
    try:
        number = int(value)
    except ValueError:
        raise DriftError(f"--{flag} must be a whole number, got {value!r}") from None
    if number < MINIMA[flag]:
        raise DriftError(f"--{flag} must be at least {MINIMA[flag]}, got {value}")
    if number > MAXIMA.get(flag, number):
        raise DriftError(f"--{flag} must be at most {MAXIMA[flag]}, got {value}")
