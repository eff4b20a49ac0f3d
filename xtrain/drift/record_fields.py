"""Do the JSON files of a record hold what its reader takes for granted?

The manifest finds what was damaged by chance. A file that was edited together with its manifest
passes there, and is refused here by name instead of failing somewhere in a comparison.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xtrain import files
from xtrain.drift import flag_values
from xtrain.drift.errors import DriftError
from xtrain.drift.values import DTYPES, NUM_SAMPLES
from xtrain.files import Check, is_count, is_text, shown
from xtrain.files import is_object as _is_dict

FORMAT = "xtrain.drift"
VERSION = 2  # raised when an older reader could not read a newer record
READABLE = (1, 2)  # 1 has no operands and keeps no small result whole
# what an operand is that no op of the forward has computed; the next weight is one less
INPUT, UNKNOWN, FIRST_WEIGHT = -1, -2, -3
MODES = (*flag_values.MODES, "unobserved")
NOT_FINITE = ("nan", "inf", "-inf")  # how numbers that JSON has not are written


def is_number(value: Any) -> bool:
    """Return whether a value is a number, or the text for one that JSON has not."""
    if type(value) is float:
        return math.isfinite(value)
    return type(value) is int and abs(value) < 2**1000 or value in NOT_FINITE


def is_id(value: Any) -> bool:
    """Return whether a value is what a model takes as a token: any integer of 64 bits."""
    return isinstance(value, int) and -(1 << 63) <= value < 1 << 64


def listed(check: Check, size: int | None = None) -> Check:
    """Return the check for a list whose every element passes one, of `size` where it is known."""

    def passes(value: Any) -> bool:
        fits = isinstance(value, list) and size in (None, len(value))
        return fits and all(check(item) for item in value)

    return passes


def optional(check: Check) -> Check:
    """Return the check for null or what passes one."""
    return lambda value: value is None or check(value)


def one_of(values: Sequence[Any]) -> Check:
    """Return the check for some strings."""
    return lambda value: isinstance(value, str) and value in values


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("([0-9a-f]{32})+", value) is not None


def _hashes(value: Mapping[str, Any]) -> bool:
    return all(map(_is_hash, value.values()))


def _is_key(value: Any) -> bool:
    if not isinstance(value, list) or len(value) not in (3, 5):
        return False
    fits = listed(is_text, 3)(value[:3]) and value[2] in DTYPES
    return fits and (len(value) == 3 or listed(_is_origin)(value[3]) and is_text(value[4]))


def _is_origin(value: Any) -> bool:
    return type(value) is int and abs(value) < 1 << 31


def is_row(value: Any) -> bool:
    """Return whether a value is a fingerprint of a training step."""
    if not isinstance(value, list) or len(value) != 7:
        return False
    *names, dtype, shape, mark, statistics = value
    fits = listed(is_text, 3)(names) and one_of(list(DTYPES))(dtype) and _is_hash(mark)
    return fits and listed(is_count)(shape) and listed(is_number, 4)(statistics)


def _positive(value: Any) -> bool:
    return is_count(value) and value > 0


RECORD: dict[str, Check] = {
    "format": one_of([FORMAT]),
    "version": lambda value: type(value) is int and value in READABLE,
    "environment": _is_dict,
    "model": _is_dict,
    "run": _is_dict,
    "observer_effect": optional(_is_dict),
    "prompts": lambda value: listed(_is_dict)(value) and bool(value),
    "tables": lambda value: listed(listed(_is_key))(value) and bool(value),
}
MODEL: dict[str, Check] = {
    "kind": is_text,
    "blocks": listed(is_text),
    "weights": listed(_is_dict),
}
WEIGHT: dict[str, Check] = {
    "name": is_text,
    "shape": listed(is_count),
    "dtype": one_of(list(DTYPES)),
    "xxh3_128": _is_hash,
    "samples": listed(is_number, NUM_SAMPLES),
}
OPTIONAL: dict[str, Check] = {  # of a weight and of the model; older records lack them
    "rounded": lambda value: _is_dict(value) and set(value) <= set(DTYPES) and _hashes(value),
    "checkpoint": _is_hash,
}
RUN: dict[str, Check] = {
    "mode": one_of(MODES),
    "dtype": is_text,
    "device": is_text,
    "batch_size": _positive,
    "pad_to": optional(is_count),
    "decode": optional(one_of(flag_values.DECODERS)),
    "num_tokens": _positive,
    "temperature": lambda value: is_number(value) and not is_text(value),
    "sample_seed": is_count,
    "top_k": _positive,
    "tensors": _is_bool,
    "op_steps": optional(is_count),
    "warm_up": is_count,
}
EFFECT: dict[str, Check] = {"differs": _is_bool, "max_abs": is_number}
PROMPT: dict[str, Check] = {"tokens": optional(listed(is_id)), "text": optional(is_text)}
CASE: dict[str, Check] = {"text": optional(is_text), "steps": listed(_is_dict)}
STEP: dict[str, Check] = {
    "length": is_count,
    "tokens": lambda value: listed(is_id)(value) and bool(value),
    "margin": listed(is_number),
    "top_ids": listed(listed(is_count)),
    "top_logits": listed(listed(is_number)),
    "ops_table": is_count,
    "blocks_table": is_count,
}


def read_json(path: Path) -> Any:
    """Return what a file holds. Raises: DriftError, naming the file, for one that is no JSON."""
    try:
        return files.json_file(path)
    except OSError as error:
        raise DriftError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise damaged(path, str(error)) from None


def check_record(contents: Any, path: Path) -> None:
    """Raise DriftError, naming the field, unless record.json has its form."""
    check_fields(contents, RECORD, path)
    model, run = contents["model"], contents["run"]
    check_fields(model, MODEL, path, "model.")
    check_fields(run, RUN, path, "run.")
    for number, weight in enumerate(model["weights"]):
        check_fields(weight, WEIGHT, path, f"model.weights[{number}].")
        _check_optional(weight, "rounded", path, f"model.weights[{number}].")
    _check_optional(model, "checkpoint", path, "model.")
    names = [weight["name"] for weight in model["weights"]]
    if len(set(names)) < len(names):
        raise damaged(path, "model.weights has a name twice")
    if contents["observer_effect"] is not None:
        check_fields(contents["observer_effect"], EFFECT, path, "observer_effect.")
    for number, prompt in enumerate(contents["prompts"]):
        check_fields(prompt, PROMPT, path, f"prompts[{number}].")
        if not _is_hash(prompt.get("xxh3_128", "0" * 32)):
            raise wrong(path, f"prompts[{number}].xxh3_128", prompt["xxh3_128"])
        if run["decode"] is not None and not prompt["tokens"]:
            raise wrong(path, f"prompts[{number}].tokens", prompt["tokens"])


def check_formulas(contents: Mapping[str, Any], path: Path) -> None:
    """Raise DriftError unless ops compute from ops before them, and from weights that there are."""
    last = FIRST_WEIGHT - len(contents["model"]["weights"])
    for number, table in enumerate(contents["tables"]):
        for row, (*_, operands, _) in enumerate(key for key in table if len(key) > 3):
            if any(not last < origin < row for origin in operands):
                raise damaged(path, f"tables[{number}][{row}] computes from {operands}"[:80])


def check_case(contents: Any, path: Path, record: Mapping[str, Any], number: int) -> None:
    """Raise DriftError, naming the field, unless case_NNNN.json fits record.json."""
    check_fields(contents, CASE, path)
    run, steps = record["run"], contents["steps"]
    expected = 1 if run["decode"] is None else run["num_tokens"]
    if len(steps) != expected:
        raise damaged(path, f"steps are {len(steps)}, not {expected}")
    for index, step in enumerate(steps):
        where = f"steps[{index}]."
        check_fields(step, STEP, path, where)
        for name in ("ops_table", "blocks_table"):
            if step[name] >= len(record["tables"]):
                raise wrong(path, where + name, step[name])
        length = len(record["prompts"][number]["tokens"] or [None]) + index
        several = run["decode"] is not None and len(step["tokens"]) != 1
        if several or step["length"] != length:
            raise damaged(path, f"{where}length is not {length}, or several tokens are chosen")
        end = step.get("text_end")  # records from before it lack it
        if not optional(is_count)(end) or (end or 0) > len(contents["text"] or ""):
            raise wrong(path, where + "text_end", end)
        _check_positions(step, run["top_k"], path, where)


def _check_positions(step: Mapping[str, Any], top_k: int, path: Path, where: str) -> None:
    """Every position has its margin, and as many candidates as the others."""
    size, count = len(step["tokens"]), len((step["top_ids"] or [[]])[0])
    if len(step["margin"]) != size:
        raise damaged(path, f"{where}margin has {len(step['margin'])} numbers, not {size}")
    for name in ("top_ids", "top_logits"):
        rows = step[name]
        if len(rows) != size or not 0 < count <= top_k or any(len(row) != count for row in rows):
            raise damaged(path, f"{where}{name} has not {top_k} or fewer for each of {size} tokens")


def check_fields(value: Any, fields: Mapping[str, Check], path: Path, prefix: str = "") -> None:
    """Raise DriftError, naming the field, unless value is an object whose fields pass."""
    try:
        files.check_fields(value, fields, prefix)
    except ValueError as error:
        raise damaged(path, str(error)) from None


def _check_optional(value: Mapping[str, Any], name: str, path: Path, prefix: str) -> None:
    if name in value and not OPTIONAL[name](value[name]):
        raise wrong(path, prefix + name, value[name])


def wrong(path: Path, name: str, value: Any) -> DriftError:
    """Return the error for a field that cannot have its value."""
    return damaged(path, f"{name} is {shown(value)}")


def damaged(path: Path, what: str) -> DriftError:
    """Return the error for a file of a record."""
    return DriftError(f"{path} is damaged: {what}; record again")
