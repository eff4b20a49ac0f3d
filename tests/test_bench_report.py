"""Reports of training steps and of the drift study, from outcomes whose figures are known."""

from __future__ import annotations

import json
import math
import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import drift_study
from bench import report as bench_report
from bench.drift.records import Machines, Margins, name_of
from bench.train import report as train_report
from bench.train.report import Results, build_report, draw_losses
from bench.train.turns import Outcome, Plan
from bench.train.variants import KINDS, LLAMA_SHAPES, Setting
from xtrain.drift import compare
from xtrain.drift.cli import main as drift_main
from xtrain.drift.comparison.drift_report import size_text

ROOT = Path(__file__).resolve().parent.parent

SIZES = dict(preset="tiny", batch=2, seq=16, vocab=16)
TINY = Setting(**SIZES, dropout=0.1, device="cpu", dtype="fp32")
DEFAULT_VARIANTS = KINDS["transformer"].default


def outcome(step_ms, *, loss_shift=0.0, masks=None, error=None, blocks=7):
    return Outcome(
        blocks=[[[step_ms, step_ms], [step_ms, step_ms]]] * blocks,
        first={"losses": [2.0 + loss_shift, 1.0], "first_step_s": 10.0, "passes_ms": 200.0},
        final={"peak_memory_gib": 1.5, "num_recompiles": 0, "num_graphs": 1},
        masks=masks or {},
        error=error,
    )


def masks(*names, expected=("o1", "o2")):
    return {"forward": list(names), "backward": list(names), "expected": list(expected)}


def sample_outcomes(**changes):
    found = {
        "eager": outcome(200.0, masks=masks("e1", "e2")),
        "torch": outcome(100.0, loss_shift=0.5, masks=masks("e1", "t2")),
        "torch-p0": outcome(80.0),
        "xtrain": outcome(50.0, loss_shift=1e-6, masks=masks("o1", "o2")),
        "xtrain-p0": outcome(49.0),
        "xtrain-eager": outcome(160.0, masks=masks("o1", "o2")),
    }
    return found | changes


def sample_report(outcomes=None, setting=TINY):
    plan = Plan(DEFAULT_VARIANTS, num_blocks=7, num_steps=3, num_warm_up=1)
    environment = {"cpu": "Some CPU", "cpu_threads": 2, "commit": "abc", "gpu": "n/a"}
    command = "python bench/compare.py"
    return build_report(setting, plan, environment, outcomes or sample_outcomes(), command)


def cells(report, label):
    row = next(row for row in report.rows if row[0] == label)
    return dict(zip(report.headers, row, strict=True))


def test_a_row_holds_what_was_measured():
    assert cells(sample_report(), "xtrain.compile, dropout") == {
        "Variant": "xtrain.compile, dropout",
        "Step time p50 [p20, p80] (ms)": "50 [50, 50]",
        "Tokens/s": "640",  # 2 * 16 tokens in 50 ms
        "Peak memory (GiB)": "1.5",
        "First step (s)": "10.0",
        "Recompiles": "0",
        "vs eager": "4.000 [4.000, 4.000]",
        "vs torch.compile": "2.000 [2.000, 2.000]",
        "Max loss difference": "1.0e-06",
        "Masks": "2 of 2 equal the oracle's",
    }


def test_f_dropout_is_held_to_eager_and_said_to_draw_other_masks():
    row = cells(sample_report(), "torch.compile + F.dropout")
    assert row["Max loss difference"] == "5.0e-01 (other masks)"
    assert row["Masks"] == "1 of 2 equal eager's"


def test_a_mask_counts_only_if_the_backward_has_it_too():
    found = masks("o1", "o2") | {"backward": ["o1", "other"]}
    outcomes = sample_outcomes(xtrain=outcome(50.0, masks=found))
    assert Results(TINY, outcomes).equal_masks("xtrain") == (1, 2)


@pytest.mark.parametrize(
    "step_ms, words",
    [
        (50.0, "at 2.000 [2.000, 2.000] x the speed of torch.compile with F.dropout (faster)"),
        (125.0, "at 0.800 [0.800, 0.800] x the speed of torch.compile with F.dropout (slower)"),
    ],
)
def test_the_result_says_wins_and_losses(step_ms, words):
    (sentence,) = sample_report(sample_outcomes(xtrain=outcome(step_ms))).result
    assert words in sentence
    cost = 100 * (step_ms / 49 - 1)
    assert f"dropout added {cost:.1f}%" in sentence
    assert "where F.dropout added 25.0%" in sentence


def test_a_failed_variant_keeps_its_row_and_says_why():
    failed = Outcome(error="first_steps: RuntimeError: out of memory")
    report = sample_report(sample_outcomes(torch=failed))
    row = cells(report, "torch.compile + F.dropout")
    assert row["Step time p50 [p20, p80] (ms)"] == f"failed: {failed.error}"
    assert row["Tokens/s"] == row["vs eager"] == "n/a"
    assert cells(report, "xtrain.compile, dropout")["vs torch.compile"] == "n/a"
    assert "Failed: torch.compile + F.dropout" in report.result[-1]
    assert any(failed.error in line for line in report.limits)


def test_claims_are_checked_at_the_claimed_shape_alone():
    small = replace(TINY, preset="small")
    verdicts = {claim: (m, v) for claim, _, m, v in sample_report(setting=small).checks}
    speed = "speed of xtrain.compile, dropout / torch.compile + F.dropout"
    assert verdicts[speed] == ("2.000 [2.000, 2.000]", "met")
    share = "graph passes' share of the first step"
    assert verdicts[share] == ("2.0%", "met")
    slow = sample_outcomes(xtrain=outcome(103.0))
    missed = {claim: v for claim, _, _, v in sample_report(slow, setting=small).checks}
    assert missed[speed] == "missed"  # 100 / 103 < 0.98
    cost = "time of xtrain.compile, dropout over xtrain.compile, no dropout"
    assert missed[cost] == "missed"
    assert [claim for claim, *_ in sample_report().checks if "speed" in claim] == []


def test_markdown_and_json(tmp_path):
    report = sample_report()
    report.write(tmp_path / "new" / "r.json", tmp_path / "new" / "r.md")
    text = (tmp_path / "new" / "r.md").read_text()
    parts = ["Question", "Result", "Setup", "Method", "Table", "Reproduce", "Limits"]
    positions = [text.index(f"**{part}.**") for part in parts]
    assert positions == sorted(positions)
    assert text.count("\n| ") >= 1 + len(DEFAULT_VARIANTS)
    assert "gpu n/a" not in text
    data = json.loads((tmp_path / "new" / "r.json").read_text())["data"]
    assert data["variants"]["xtrain"]["blocks_ms"] == [[[50.0] * 2] * 2] * 7
    assert data["variants"]["xtrain"]["step_time_ms"]["p50"] == 50.0


def test_json_holds_no_nan():
    assert bench_report.plain({"a": math.nan, "b": [1, 2.0, None, True, Path("x")]}) == {
        "a": None,
        "b": [1, 2.0, None, True, "x"],
    }


# --- transformers' Llama --------------------------------------------------------------------------


def test_claims_and_ratios_follow_from_the_times(tmp_path):
    """Times of 120, 110, 100 and 99 ms: 1.2, 1.1 and 0.99 x."""
    times = {"torch": 120.0, "liger": 110.0, "xtrain": 100.0, "own": 99.0}
    swaps = {"use_triton_rope": "2 of 2"}
    outcomes = {
        name: Outcome(
            blocks=[[[ms] * 3, [ms] * 3] for _ in range(7)],
            first={"first_step_s": 10.0, "passes_ms": 600.0, "swaps": swaps, "losses": [3.0]},
            final={"losses": [3.0, 2.0 + ms / 1e3], "num_recompiles": 0, "peak_memory_gib": 1.0},
        )
        for name, ms in times.items()
    }
    outcomes["xtrain-p0"] = Outcome(final={"losses": [3.0, 2.15]})
    outcomes["blocks"] = Outcome(first={"first_step_s": 4.0})
    outcomes["liger-torch"] = Outcome(error="first_steps: Unsupported: x")
    shape = LLAMA_SHAPES["1b"]
    llama = replace(TINY, preset="1b", model="llama", shape=shape, device="cuda")
    plan = Plan(tuple(outcomes), 7, 3, 1)
    report = build_report(llama, plan, {"gpu": "NVIDIA H200"}, outcomes, "python bench/...")
    assert [(c[1], c[2], c[3]) for c in report.checks] == [
        (">= 1.20", "1.200 [1.200, 1.200]", "met"),
        (">= 1.12", "1.100 [1.100, 1.100]", "missed"),
        (">= 0.98", "0.990 [0.990, 0.990]", "met"),
        ("<= 5%", "6.0%", "missed"),
        ("<= 0.50", "0.40", "met"),
        ("<= 2 x Liger's, 0.01", "0.015", "missed"),
    ]
    text = report.markdown()
    assert "failed: first_steps: Unsupported: x" in text and "use_triton_rope 2 of 2" in text
    assert "losses of all steps stay within 0.01 of torch.compile's" in text  # Liger's
    assert report.data["variants"]["torch"]["losses"] == [3.0, 2.12]
    draw_losses(tmp_path / "curves.png", llama, outcomes)
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_every_claim_and_default_names_a_variant():
    speeds, costs = train_report.SPEED_CLAIMS, train_report.COST_CLAIMS
    for (model, _), claims in [*speeds.items(), *costs.items()]:
        kind = KINDS[model]
        assert {n for claim in claims for n in claim[:2]} <= set(kind.default)
        assert set(kind.default) <= set(kind.variants)


# --- the drift study ------------------------------------------------------------------------------


def bisected(*first_divergences, **more):
    """Results of a bisect: one run each, in a set of its own where something differs."""
    runs = [
        dict(setting=f"run {i}", group="AB"[bool(first)], exit_code=int(bool(first)), error=None)
        | dict(first_divergence=first, size="2 ulp" if first else None, max_shift=6.2e-06)
        for i, first in enumerate(first_divergences)
    ]
    return dict(runs=runs, sets=["A", "B"], effects=[["threads", "none"]], interactions=[], **more)


def test_the_page_of_the_drift_study():
    packages = [dict(package="torch", to="2.11", error=None, first_divergence=None)]
    packages[0]["from"] = "2.13"
    found = bisected(None, "blocks.0: aten.mm")
    bisects = dict.fromkeys(("settings", "selectors", "compiled", "short"), found)
    bisects["versions"] = bisected(None, packages=packages)
    ops = {
        "MKL_CBWR=COMPATIBLE,AVX2": [
            dict(op="mm", first=2, picture=".###"),
            dict(op="add", first=None, picture="...."),
        ],
        "threads=1,2": [dict(op="sdpa_one_query", first=None, picture="....")],
    }
    margins = Margins([[0.4, 0.2], [0.3, 0.1]], [1e-5, 3e-6], loops=[1], first="blocks.0")
    margins.tightest = margins.nearest = (0.1, 1e-5, "def")
    names = ("cpu.model", "cpu.count", "torch.version", "torch.blas", "torch.onednn")
    args = Namespace(work=Path("none"), gpu=[], python=["venv"], commit="abc", prompts=2, tokens=2)
    page = drift_study.page(ops, bisects, margins, dict.fromkeys(names, "3.12 (x)"), args)
    page = re.sub(" +", " ", page)  # the columns' widths are no matter
    for said in (
        "2 runs under other threads, instruction sets and batch sizes are 2 sets of equal bits",
        "the smallest margin, 0.1, is 1e+04 times the largest shift, 1e-05. 1 of 2 texts end in",
        "| run 1 | B | 1 | blocks.0: aten.mm | 2 ulp | 6.2e-06 |",
        "torch 2.13 -> 2.11 alone: no effect.\n\n## Which ops keep their bits",
        "| `mm` | 2 | `.###` |\n\nEqual at every length: `add`.",
        "**threads: 1 against 2**, 64 rows. Every op keeps its bits at every length.\n",
        "Products of few rows need not: `bisect small --factor threads=1,2` on the prompt `hello`",
        "- median margin of the first 10 steps 0.25, of the last 10 0.25; 1 of 2 prompts end in a",
        "python bench/drift_study.py --python VENV ...\n",
    ):
        assert said in page, said
    assert "\n\n\n" not in page


# --- the study's section on records of another machine -------------------------------------------


def section(work, others, pieces, tokens):
    """The study's section as its template makes it."""
    return bench_report.render(
        ROOT / "bench/drift/machines.md.jinja",
        machines=Machines.of(work, others, pieces),
        args=SimpleNamespace(tokens=tokens),
        name_of=name_of,
        size_of=size_text,
    )


def test_the_section_of_the_study(tmp_path, capfd):
    shared = ["tiny", "--tokens=2", "--num-prompts=2", "--threads=1"]
    for name, *flags in (("devices",), ("bf16", "--dtype=bf16"), ("other", "--seed=1")):
        assert drift_main(["record", f"--out={tmp_path}/{name}.drift", *shared, *flags]) == 0
    text = section(tmp_path, [tmp_path / "bf16.drift"], [], 2)
    row = next(line for line in text.splitlines() if "bf16 |" in line).split("|")
    assert row[3].strip() == "embedding: aten.embedding" and "(" in row[4]
    assert int(row[7]) <= 4 and "2 built-in prompts x 2 tokens" in text
    with pytest.raises(SystemExit, match=r"other\.drift: other"):
        section(tmp_path, [tmp_path / "other.drift"], [], 2)


def test_the_trained_run_on_two_machines(tmp_path, capfd):
    """Its pieces find their partners by their prompts, and each setting is one row."""
    (tmp_path / "first.json").write_text("[[1, 2, 3], [4, 5, 6]]")
    (tmp_path / "second.json").write_text("[[7, 8]]")
    made = []
    for out, listed, *flags in (
        ("a_1", "second"),
        ("a_0", "first"),
        ("b_0", "first", "--dtype=bf16"),
        ("b_1", "second", "--dtype=bf16"),
    ):
        made.append(tmp_path / f"{out}.drift")
        arguments = ["record", "tiny", "--tokens=12", "--threads=1", f"--out={made[-1]}", *flags]
        assert drift_main([*arguments, f"--prompts={tmp_path}/{listed}.json"]) == 0
    text = section(tmp_path, made[2:], made[:2], 12).strip()
    row = [cell.strip() for cell in text.splitlines()[-1].split("|")]
    assert row[1].endswith("bf16") and row[2] == "embedding: aten.embedding" and row[3] == "3"
    assert "drawn by NumPy" not in text and "12 tokens each" in text
    comparisons = [compare(a, b) for a, b in ((made[1], made[2]), (made[0], made[3]))]
    shifts = [place.shift for c in comparisons for place in c.positions]
    assert row[4] == str(len(shifts)) and row[5] == f"{max(shifts):.3g}"
