"""The coverage table: what the records of coverage.py say, next to the sites that are expected."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
Record = dict[str, Any]

EXACT, REFUSED, WRONG, PART = "exact", "refused", "WRONG", "sites right"
NOT_TRAINED, NOT_BUILT, LEFT = "torch fails", "not built", "not measured"

_WHY = {
    EXACT: "sites, masks, p = 0 and checkpointing all as they should be",
    PART: "sites and masks of one eager forward as they should be; the rest is not measured yet",
    REFUSED: "xtrain.compile raises and says why; nothing trains with a wrong mask",
    WRONG: "something differs from what it should be",
    NOT_TRAINED: "plain `torch.compile(fullgraph=True, backend=\"aot_eager\")` does not train it; "
    "what xtrain.compile does across the graph breaks stands in the row",
    NOT_BUILT: "the shrunken model cannot be built or run by itself",
    LEFT: "this run did not get to it",
}  # fmt: skip
_SWAPS = {
    "use_triton_rms_norm": "norm",
    "use_triton_rope": "rope",
    "use_triton_swiglu": "swiglu",
    "use_triton_geglu": "geglu",
    "use_triton_sdpa": "sdpa",
    "use_triton_linear_cross_entropy": "loss",
    "fuse_dropout_add_rms_norm": "fused",
}


def expected_sites() -> dict[str, str]:
    """Return type -> its sites, from the reviewed table."""
    with (HERE / "coverage_expected.toml").open("rb") as file:
        table = tomllib.load(file)
    return {**dict.fromkeys(table["types"], table["usual"]), **table["other"]}


def verdict(record: Record | None, expected: str | None) -> tuple[str, str]:
    """Return a class's verdict and what to say beside it."""
    if record is None:
        return LEFT, ""
    if "not_built" in record:
        return NOT_BUILT, record["not_built"]
    faults = faults_of(record, expected)
    if record.get("plain", True) is not True:
        ours = "as expected across the breaks" if not faults else "; ".join(faults)
        return NOT_TRAINED, f"{record['plain']} - xtrain.compile: {ours}"
    if "refused" in record:
        return REFUSED, record["refused"]
    if "plain" not in record and not faults:
        return PART, ""
    return (WRONG, "; ".join(faults)) if faults else (EXACT, "")


def faults_of(record: Record, expected: str | None) -> list[str]:
    """Return everything in a record that is not as it should be."""
    faults = [f"{key}: {record[key]}" for key in ("refused", "failed", "ended") if key in record]
    if expected is None:
        faults.append("no expected sites in coverage_expected.toml")
    elif "sites" in record and record["sites"] != expected:
        faults.append(f"sites {record['sites'] or 'none'}, expected {expected}")
    if record.get("masks", True) is not True:
        faults.append(f"masks: {record['masks']}")
    whole = record.get("plain") is True
    if whole and record.get("p0", True) is not True:
        faults.append(f"p = 0: {_said(record['p0'])}")
    checkpoint = record.get("checkpoint", True)
    if checkpoint is not True and not _is_excused(checkpoint):
        faults.append(f"checkpointing: {_said(checkpoint)}")
    if isinstance(record.get("swaps"), str):
        faults.append(f"swaps: {record['swaps']}")
    return faults


def _is_excused(checkpoint: Any) -> bool:
    """Whether checkpointing is not ours to judge: the class has none, or plain torch fails too."""
    excuses = ("the class has no", "plain torch.compile fails too", "plain torch.compile differs")
    return isinstance(checkpoint, str) and checkpoint.startswith(excuses)


def _said(value: Any) -> str:
    return "differs" if value is False else str(value)


def write_table(path: Path, data: dict[str, Any], types: dict[str, str]) -> None:
    """Write docs/coverage.md."""
    expected = expected_sites()
    records = data["classes"]
    rows = {name: verdict(records.get(name), expected.get(name)) for name in types}
    counts = Counter(row[0] for row in rows.values())
    path.write_text("\n".join(_lines(data, types, rows, counts, expected)) + "\n")


def _lines(
    data: dict[str, Any],
    types: dict[str, str],
    rows: dict[str, tuple[str, str]],
    counts: Counter[str],
    expected: dict[str, str],
) -> list[str]:
    whole = [name for name, r in data["classes"].items() if r.get("plain") is True]
    exact = sum(rows[name][0] == EXACT for name in whole)
    verified = [r["verified"] for r in data["classes"].values() if "verified" in r]
    swapped = [v for v in verified if v["num_graphs"]]
    partly = sum(bool(v["left_out"]) for v in swapped)
    share = f" ({exact / len(whole):.1%})" if whole else ""
    environment = data["environment"]
    commits = sorted({r.get("commit", "") for r in data["classes"].values()} - {""})
    lines = [
        "# Coverage: causal language models of transformers",
        "",
        "**Question.** What does `xtrain.compile` do to a model that it has never seen?",
        "",
        f"**Result.** Of {len(whole)} classes that were checked in full and that plain fullgraph "
        f"`aot_eager` trains, {exact} come out exact{share}. Of {counts[PART]} more a quick look "
        f"(one eager forward) found the right sites and masks. {counts[REFUSED]} are refused, "
        f"{counts[WRONG]} come out wrong. {counts[LEFT]} of {len(types)} are still to be measured. "
        f"`verify=True` held {sum(map(_num_verified, swapped))} losses, outputs and gradients of "
        f"{len(swapped)} classes with swaps to their graphs without; of {partly} a part was left "
        "out.",
        "",
        f"**Setup.** torch {environment['torch']}, transformers {environment['transformers']}, "
        f"Python {environment['python']}, CPU; commits {', '.join(commits) or 'unknown'}. "
        "Every class from a configuration of two layers and hidden size 64, its own dropout off.",
        "",
        "| verdict | classes | meaning |",
        "|---|---|---|",
        *(f"| {name} | {counts[name]} | {why} |" for name, why in _WHY.items()),
        "",
        "**Method.** `bench/coverage_check.py` says what each check does. A word in *sites* is a "
        "block, a letter a site: A attention, C cross-attention, F anything else; *expected* is "
        "`bench/coverage_expected.toml`, read off the modelling code and not from the finder. "
        "*masks*: every call of the dropout op against `xtrain.ops.dropout_mask`. *p = 0*: loss "
        "and gradients bitwise those of `aot_eager`. *checkpoint*: loss and gradients at p = 0.5 "
        "bitwise equal with and without gradient checkpointing. *swaps*: calls of each kind that "
        '`kernels="auto"` replaced, and how far the loss moved. *verified*: losses, outputs and '
        "gradients of that step that agree with the graph without swaps, and the largest error as "
        "a part of its bound.",  # fmt: skip
        "",
        "| type | verdict | graphs | sites | expected | masks | p = 0 | checkpoint | swaps "
        "| verified |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, (word, _) in rows.items():
        record = data["classes"].get(name)
        if record is not None and "not_built" not in record:
            lines.append(_row(name, word, record, expected.get(name, "?")))
    lines += ["", "## What is not exact, and why", ""]
    lines += [
        f"- `{name}`: {word}. {_escaped(why)}"
        for name, (word, why) in rows.items()
        if word not in (EXACT, PART, LEFT)
    ]
    left = [name for name, (word, _) in rows.items() if word == LEFT]
    if left:
        lines += ["", f"## Still to be measured ({len(left)})", "", ", ".join(left)]
    lines += [
        "",
        "**Reproduce.** `python bench/coverage.py --jobs 2` takes up where the last run ended "
        "(at most 3 hours for all on two cores); `--only llama,gpt2` measures these again.",
    ]
    return lines


def _row(name: str, word: str, record: Record, expected: str) -> str:
    sites = record.get("sites")
    if sites is None and "sites_not_strict" in record:
        sites = f"({record['sites_not_strict']})"
    cells = [
        name,
        word,
        record.get("graphs", "-"),
        sites or "-",
        expected,
        _mark(record.get("masks")),
        _mark(record.get("p0")),
        _mark(record.get("checkpoint")),
        _swaps(record),
        _verified(record),
    ]
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _mark(value: Any) -> str:
    if value is True:
        return "yes"
    return "NO" if value is False else "-" if value is None else "(below)"


def _swaps(record: Record) -> str:
    swaps = record.get("swaps")
    if not isinstance(swaps, dict):
        return "-"
    listed = ", ".join(f"{swaps[k]} {word}" for k, word in _SWAPS.items() if k in swaps)
    moved = record.get("swapped_loss_difference", 0.0)
    return f"{listed or 'none'}; {moved:.0e}" if moved else listed or "none"


def _num_verified(found: Record) -> int:
    return found["num_losses"] + found["num_outputs"] + found["num_gradients"]


def _verified(record: Record) -> str:
    found = record.get("verified")
    if not found or not found["num_graphs"]:
        return "-"
    said = f"{_num_verified(found)}; {found['largest']:.2g}"
    return f"{said} (in part)" if found["left_out"] else said


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
