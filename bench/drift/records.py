"""What benchmarks do with records of xtrain.drift: eager against compiled, margins, other machines.

`bench/compare.py --drift` prints the first; bench/drift_study.py writes the others: how near two
settings come to another token, and records of a GPU against one that was made here:

    python -m xtrain.drift record --device cuda --out gpu.drift small      on the machine with a GPU
    python -m xtrain.drift record --device cuda --out trained_000.drift RUN \\
        --prompts prompts_000.txt --tokens 100 --batch 25 --op-steps 1     there too, each piece
    python bench/drift_study.py --gpu gpu.drift trained_*.drift            here

A preset's weights are drawn by NumPy, so that both machines start from equal bits without a copy;
RUN and its prompts are copies of those in the study's --work.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from bench.train.models import autocast, build_config
from bench.train.variants import Setting
from xtrain import compile as xtrain_compile
from xtrain import drift
from xtrain.drift import Comparison, compare
from xtrain.drift.bisect import run_child
from xtrain.drift.comparison.drift_report import as_text, context
from xtrain.drift.comparison.flip import find_loop
from xtrain.drift.recording.record_format import Record
from xtrain.drift.recording.recorded_model import draw_tokens, draw_weights
from xtrain.model import Transformer

# --- eager against compiled -----------------------------------------------------------------------

MAX_TOKENS = 256  # of the sequence: the logits of every position are kept


def compare_with_eager(setting: Setting) -> dict[str, drift.Comparison]:
    """Return variant -> its comparison with the eager model, which is a."""
    setting = replace(setting, batch=1, seq=min(setting.seq, MAX_TOKENS))
    if setting.threads is not None:
        torch.set_num_threads(setting.threads)
    model = Transformer(build_config(setting))
    draw_weights(model, setting.seed)
    model.to(setting.device).eval()
    drawn = draw_tokens(setting.batch, setting.seq, setting.vocab, setting.seed)
    tokens = torch.from_numpy(drawn).to(setting.device)
    with autocast(setting):
        eager = drift.record(model, tokens)
        fused = drift.record(model, tokens, mode="inductor")
        compiled = xtrain_compile(model, dropout=setting.dropout, seed=setting.seed).eval()
        ours = drift.record(compiled, tokens)
    return {
        "torch.compile": drift.compare(eager, fused),
        "xtrain.compile": drift.compare(eager, ours),
    }


def eager_against_compiled(setting: Setting) -> str:
    """Return as text where the numbers of what is compiled leave those of eager.

    One forward of one sequence, no dropout: the eager model op by op against torch.compile (block
    outputs) and against xtrain.compile (logits).
    """
    parts = []
    for name, comparison in compare_with_eager(setting).items():
        parts.append(f"=== eager (A) and {name} (B) ===\n\n{as_text(comparison)}")
    return "\n".join(parts)


# --- margins -------------------------------------------------------------------------------------


@dataclass
class Margins:
    """What 200 prompts x 100 tokens say, over all pieces."""

    margins: list[list[float]] = field(default_factory=list)  # per prompt and step, of A
    shifts: list[float] = field(default_factory=list)
    num_can_flip: int = 0
    num_other_tokens: int = 0
    num_equal_prompts: int = 0
    loops: list[int] = field(default_factory=list)  # first step of each
    tightest: tuple[float, float, str] = (float("inf"), 0.0, "")  # margin, its shift, text
    nearest: tuple[float, float, str] = (float("inf"), 1.0, "")
    first: str = ""

    def steps(self, start: int | None, stop: int | None) -> list[list[float]]:
        """Return the margins of some steps of every prompt."""
        return [steps[start:stop] for steps in self.margins]


def gather(found: Margins, a: Path, b: Path) -> None:
    """Add one piece."""
    comparison = compare(a, b)
    if comparison.reason is not None:
        raise SystemExit(f"{a} and {b}: {comparison.reason}")
    found.first = found.first or str(comparison.first_divergence)
    for case in comparison.a.cases:
        found.margins.append([float(step.info["margin"][0]) for step in case.steps])
        loop = find_loop([step.tokens[0] for step in case.steps])
        if loop is not None:
            found.loops.append(loop[0])
    found.num_other_tokens += sum(not prompt.tokens_equal for prompt in comparison.prompts)
    found.num_equal_prompts += sum(prompt.logits_equal for prompt in comparison.prompts)
    for position in comparison.positions:
        found.shifts.append(position.shift)
        found.num_can_flip += position.can_flip
        place = (position.margin, position.shift)
        if position.margin < found.tightest[0]:
            found.tightest = (*place, context(comparison.a, position))
        if position.shift * found.nearest[0] > position.margin * found.nearest[1]:
            found.nearest = (*place, context(comparison.a, position))


def ratio_text(margin: float, shift: float) -> str:
    """Return how many times the shift fits into the margin."""
    return f"{margin / shift:.3g}" if shift > 0 else "infinity"


# --- another machine ------------------------------------------------------------------------------

FLAGS = ("record", "small", "--threads=1")  # and what else record does by default


@dataclass
class Machines:
    """Records of another machine against those made here, as study.md.jinja shows them.

    drawn:   comparisons with this machine's record of the preset, whose weights are drawn.
    trained: device and dtype -> margins and shifts of the trained run.
    """

    drawn: list[Comparison] = field(default_factory=list)
    trained: dict[str, Margins] = field(default_factory=dict)

    @classmethod
    def of(cls, work: Path, others: list[Path], pieces: list[Path]) -> Machines:
        """Compare records of another machine.

        Args:     work: where this machine's record of the preset is made, once.
                  pieces: this machine's records of the trained run; `others` of the same prompts
                      are compared with them.
        """
        found, mine = cls(), {_prompts(path): path for path in pieces}
        for other in others:
            here = mine.get(_prompts(other))
            if here is not None:
                margins = found.trained.setdefault(name_of(Record(other)), Margins())
                gather(margins, here, other)
            else:
                found.drawn.append(compare(record_of_preset(work), other))
        if refused := [f"{c.b.path}: {c.reason}" for c in found.drawn if c.reason is not None]:
            raise SystemExit("; ".join(refused))
        return found


def _prompts(path: Path) -> str:
    """The prompts of a record, as they are compared."""
    return json.dumps(Record(path).contents["prompts"], sort_keys=True)


def record_of_preset(work: Path) -> Path:
    """Return this machine's record of the preset, made where it is missing."""
    here = work / "devices.drift"
    if not here.exists() and (done := run_child([*FLAGS, f"--out={here}"], {})).error:
        raise SystemExit(f"failed: {done.error}")
    return here


def name_of(record: Record) -> str:
    """Return the device, torch and dtype of a record."""
    environment, run = record.environment, record.run
    gpus = environment["cuda.gpus"] if run["device"].startswith("cuda") else None
    where = gpus[0].split(",")[0] if gpus else f"{environment['cpu.model']} CPU"
    dtype = "fp32" if run["dtype"] == "auto" else run["dtype"]
    return f"{where}, torch {environment['torch.version']}, {dtype}"
