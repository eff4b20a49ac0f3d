"""The part of docs/drift-study.md about another machine: records made there against one made here.

    python -m xtrain.drift record --device cuda --out gpu.drift small      on the machine with a GPU
    python -m xtrain.drift record --device cuda --out trained_000.drift RUN \\
        --prompts prompts_000.txt --tokens 100 --batch 25 --op-steps 1     there too, each piece
    python bench/drift_study.py --gpu gpu.drift trained_*.drift            here

A preset's weights are drawn by NumPy, so that both machines start from equal bits without a copy;
RUN and its prompts are copies of those in the study's --work.
"""

from __future__ import annotations

import json
from pathlib import Path

from tabulate import tabulate

from bench.drift_margins import Margins, gather
from xtrain.drift import Comparison, compare
from xtrain.drift.bisection.factors import run_child
from xtrain.drift.comparison.report import size_text
from xtrain.drift.recording.format import Record

FLAGS = ("record", "small", "--threads=1")  # and what else record does by default


def section(work: Path, others: list[Path], pieces: list[Path]) -> str:
    """Return the section as Markdown.

    Args:     work: where this machine's record of the preset is made, once.
              others: records of another machine.
              pieces: this machine's records of the trained run; `others` of the same prompts are
                  compared with them.
    """
    trained = {_prompts(path): path for path in pieces}
    partners = [(path, trained.get(_prompts(path))) for path in others]
    parts = ["## CPU against GPU"]
    if drawn := [path for path, partner in partners if partner is None]:
        parts.append(_drawn_weights(work, drawn))
    if pairs := [(here, path) for path, here in partners if here is not None]:
        parts.append(_trained_run(pairs))
    return "\n\n".join(parts)


def _prompts(path: Path) -> str:
    """The prompts of a record, as they are compared."""
    return json.dumps(Record(path).contents["prompts"], sort_keys=True)


def _trained_run(pairs: list[tuple[Path, Path]]) -> str:
    """Margins and shifts of the trained run, a row for each device and dtype."""
    found: dict[str, Margins] = {}
    for here, other in pairs:
        record = Record(other)
        name = _name(record.environment, record.run)
        gather(found.setdefault(name, Margins()), here, other)
    rows = [
        (
            name,
            margins.first,
            len(margins.margins),
            len(margins.shifts),
            f"{max(margins.shifts):.3g}",
            f"{margins.tightest[0]:.3g}",
            margins.num_can_flip,
            margins.num_other_tokens,
        )
        for name, margins in found.items()
    ]
    headers = ("B", "first difference", "prompts", "places", "max shift", "smallest margin")
    headers = (*headers, "can flip", "prompts with other tokens")
    a = Record(pairs[0][0])
    intro = (
        f"The trained model on prompts of the margins above, {a.run['num_tokens']} tokens "
        "each; A is the record of this machine's CPU in fp32, ATen level default. Where a prompt "
        "gets another token, the places behind it are not compared: they follow another text."
    )
    table = tabulate(rows, headers, tablefmt="github", disable_numparse=True)
    return f"{intro}\n\n{table}"


def _drawn_weights(work: Path, others: list[Path]) -> str:
    here = work / "devices.drift"
    if not here.exists():
        done = run_child([*FLAGS, f"--out={here}"], {})
        if done.error:
            raise SystemExit(f"failed: {done.error}")
    record = Record(here)
    comparisons = [compare(here, other) for other in others]
    refused = [f"{c.b.path}: {c.reason}" for c in comparisons if c.reason is not None]
    if refused:
        raise SystemExit("; ".join(refused))
    rows = [_row(comparison) for comparison in comparisons]
    headers = ("B", "verdict", "first difference", "size", "block outputs, first to last")
    headers = (*headers, "max shift", "places", "can flip", "flipped")
    alone = sorted({found.op for c in comparisons for found in c.unmatched})
    steps = record.run["num_tokens"]
    intro = (
        f"Preset small with weights drawn by NumPy from seed 0 (not trained: its margins are those "
        f"of noise), {len(record.cases)} built-in prompts x {steps} tokens, as `record` does them. "
        f"A is this machine's CPU in fp32, one thread, torch {record.environment['torch.version']}."
    )
    table = tabulate(rows, headers, tablefmt="github", disable_numparse=True)
    end = f"Without a partner, and never called a difference: {', '.join(map(_code, alone))}."
    return f"{intro}\n\n{table}" + (f"\n\n{end}" if alone else "")


def _row(found: Comparison) -> tuple:
    first, run = found.first_divergence, found.b.run
    growth = [layer.max_abs for layer in found.growth if layer.num_compared]
    return (
        _name(found.b.environment, run),
        found.exit_code,
        str(first) if first else "-",
        size_text(first.distance) if first else "-",
        f"{growth[0]:.3g} to {growth[-1]:.3g}" if growth else "-",
        f"{max((place.shift for place in found.positions), default=0.0):.3g}",
        len(found.positions),
        sum(place.can_flip for place in found.positions),
        sum(place.flipped for place in found.positions),
    )


def _name(environment: dict, run: dict) -> str:
    gpus = environment["cuda.gpus"] if run["device"].startswith("cuda") else None
    where = gpus[0].split(",")[0] if gpus else f"{environment['cpu.model']} CPU"
    dtype = "fp32" if run["dtype"] == "auto" else run["dtype"]
    return f"{where}, torch {environment['torch.version']}, {dtype}"


def _code(name: str) -> str:
    return f"`{name}`"
