"""Flags of record and bisect that would do nothing: refused, instead of a record that is not what
was asked for. No torch here.

A flag that was not given is None; `fill` puts in what then holds.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from xtrain.drift.errors import DriftError
from xtrain.drift.factors import Factor

DEFAULTS: dict[str, Any] = {
    "seed": 0,
    "runs": "runs",
    "num_prompts": 8,
    "prompt_length": 16,
    "tokens": 16,
    "decode": "greedy",
    "temperature": 1.0,
    "sample_seed": 0,
    "mode": "eager",
    "dtype": "auto",
    "device": "cpu",
    "batch": 1,
    "warm_up": 1,
    "top_k": 8,
}
# flag -> the flag whose values decide whether it counts, and those under which it does
SERVES = {
    "temperature": ("decode", ("sample",)),
    "sample_seed": ("decode", ("sample",)),
    "pad_to": ("decode", ("greedy", "sample")),  # generate() makes its own inputs
    "op_steps": ("mode", ("eager", "aot_eager")),  # no op is seen in what inductor makes
    "tensors": ("mode", ("eager", "aot_eager")),
}
OF_TOKENS = ("decode", "temperature", "sample_seed", "op_steps")  # nothing where none is chosen
OF_DRAWN_PROMPTS = ("num_prompts", "prompt_length")


def fill(args: argparse.Namespace, defaults: Mapping[str, Any] = DEFAULTS) -> argparse.Namespace:
    """Return the flags with the default of each that was not given."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    return argparse.Namespace(**{**vars(args), **defaults, **given})


def was_given(args: argparse.Namespace, name: str) -> bool:
    """Return whether a flag stands on the command line."""
    value = getattr(args, name)
    return value is not None and value is not False


def values_of(
    args: argparse.Namespace, factors: Sequence[Factor] | Mapping[str, str] = ()
) -> dict[str, tuple[str, ...]]:
    """Return the values that decode and mode have in the runs: those of a factor, or the flag's."""
    if not isinstance(factors, Mapping):
        factors = {factor.name: ",".join(factor.values) for factor in factors}
    found = {name: factors[name].split(",") for name in ("decode", "mode") if name in factors}
    if "compile" in factors:
        words = factors["compile"].split(",")
        found["mode"] = ["inductor" if word == "on" else "eager" for word in words]
    for name in ("decode", "mode"):
        found.setdefault(name, [getattr(args, name) or DEFAULTS[name]])
    return {name: tuple(values) for name, values in found.items()}


def counts(flag: str, values: Mapping[str, Sequence[str]]) -> bool:
    """Return whether a flag does something under some value of the flag that it serves."""
    other, allowed = SERVES.get(flag, ("", ()))
    return not other or not set(allowed).isdisjoint(values[other])


def check_factors(args: argparse.Namespace, factors: Sequence[Factor]) -> None:
    """Raise DriftError for a flag whose every run a factor sets to something else."""
    for factor in factors:
        name = factor.name.replace("-", "_")
        value = str(getattr(args, name, None))
        if hasattr(args, name) and was_given(args, name) and value not in factor.values:
            raise DriftError(
                f"--{factor.name} {value} is none of the values of the factor {factor.name} "
                f"({', '.join(factor.values)}); leave it out"
            )
        if factor.name == "compile" and was_given(args, "mode"):
            raise DriftError(f"--mode {args.mode} is decided by the factor compile; leave it out")


def check_use(args: argparse.Namespace, factors: Sequence[Factor] = ()) -> None:
    """Raise DriftError for the first flag that no run would notice."""
    check_factors(args, factors)
    values = values_of(args, factors)
    for name, (other, allowed) in SERVES.items():
        if was_given(args, name) and not counts(name, values):
            raise DriftError(
                f"{_shown(args, name)} does nothing with --{other} {', '.join(values[other])}; "
                f"leave it out, or use --{other} {' or '.join(allowed)}"
            )
    if args.tensors and args.op_steps == 0:
        raise DriftError("--tensors does nothing with --op-steps 0; leave it out")
    for name in OF_TOKENS if args.tokens == 0 else ():
        if was_given(args, name):
            raise DriftError(f"{_shown(args, name)} does nothing with --tokens 0; leave it out")


def check_use_of_model(args: argparse.Namespace, kind: str, *, tokenizer: bool) -> None:
    """Raise DriftError for a flag that says nothing to this model.

    Args:     kind: preset, run or hugging_face.
              tokenizer: whether the model's is known, so that prompts are the built-in texts.
    """
    drawn = args.prompts is None and not tokenizer
    source = f"--prompts {args.prompts}" if args.prompts is not None else "the built-in texts"
    for name in () if drawn else OF_DRAWN_PROMPTS:
        if was_given(args, name):
            raise DriftError(
                f"{_shown(args, name)} is for prompts that are drawn, these are {source}; "
                "leave it out, or name a file of --prompts with as many"
            )
    if was_given(args, "seed") and kind != "preset" and not drawn:
        raise DriftError(
            f"{_shown(args, 'seed')} draws a preset's weights and prompts, and here nothing is "
            "drawn; leave it out"
        )
    if was_given(args, "runs") and kind != "run":
        advice = f"{args.runs}/{args.model} means the run" if kind == "preset" else "leave it out"
        raise DriftError(
            f"{_shown(args, 'runs')} does nothing: {args.model} is a "
            f"{'preset, whose name wins' if kind == 'preset' else 'Hugging Face folder'}; {advice}"
        )


def _shown(args: argparse.Namespace, name: str) -> str:
    value: Any = getattr(args, name)
    flag = name.replace("_", "-")
    return f"--{flag}" if value is True else f"--{flag} {value}"
