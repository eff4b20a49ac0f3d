"""bench/compare_hf.py: what it measures is what its report says, on a machine without a GPU."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from bench import compare_hf
from bench.hf_report import build_report, draw_losses
from bench.hf_subject import Subject, text_batches
from bench.hf_variants import SHAPES, VARIANTS, Setting
from bench.turns import Outcome, Plan


def setting(**changes):
    known = dict(name="1b", shape=SHAPES["tiny"], dropout=0.1, device="cpu", dtype="fp32")
    return Setting(**{**known, "learning_rate": 1e-3, **changes})


def test_a_run_writes_its_reports(tmp_path, capsys):
    files = {name: tmp_path / f"out.{name}" for name in ("json", "markdown", "plot")}
    flags = [f"--{name}={path}" for name, path in files.items()]
    assert compare_hf.main(["--variants", "eager", "--blocks", "1", "--shape", "tiny", *flags]) == 0
    variant = json.loads(files["json"].read_text())["data"]["variants"]["eager"]
    assert len(variant["losses"]) == 4 + 2 * (1 + 2), "first steps and two visits"
    assert variant["losses"][-1] < variant["losses"][0] and variant["num_recompiles"] == 0
    assert files["plot"].read_bytes().startswith(b"\x89PNG")
    assert "| transformers" in files["markdown"].read_text()
    assert "transformers" in capsys.readouterr().out


def test_a_step_is_a_plain_training_step_of_transformers():
    subject = Subject(setting(), "eager")
    found = [subject.step().item() for _ in range(3)]
    sizes = {k: v for k, v in vars(SHAPES["tiny"]).items() if k not in ("batch", "seq")}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for loss, ids in zip(found, text_batches(setting()), strict=False):
        logits = model(ids[:, :-1]).logits[:, :-1]
        right = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:-1].flatten())
        assert loss == pytest.approx(right.item(), rel=1e-5)
        optimizer.zero_grad()
        right.backward()
        optimizer.step()


def test_claims_and_ratios_follow_from_the_times(tmp_path):
    """Times of 120, 110, 100 and 99 ms: 1.2, 1.1 and 0.99 x."""
    times = {"torch": 120.0, "liger": 110.0, "xtrain": 100.0, "own": 99.0}
    outcomes = {
        name: Outcome(
            blocks=[[[ms] * 3, [ms] * 3] for _ in range(7)],
            first={
                "first_step_s": 10.0,
                "passes_ms": 600.0,
                "swaps": {"use_triton_rope": "2 of 2"},
            },
            final={"losses": [3.0, 2.0 + ms / 1e3], "num_recompiles": 0, "peak_memory_gib": 1.0},
        )
        for name, ms in times.items()
    }
    outcomes["xtrain-p0"] = Outcome(final={"losses": [3.0, 2.15]})
    outcomes["blocks"] = Outcome(first={"first_step_s": 4.0})
    outcomes["liger-torch"] = Outcome(error="first_steps: Unsupported: x")
    plan = Plan(tuple(outcomes), 7, 3, 1)
    on_gpu = setting(device="cuda", shape=SHAPES["1b"])
    report = build_report(on_gpu, plan, {"gpu": "NVIDIA H200"}, outcomes, "python bench/...")
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
    draw_losses(tmp_path / "curves.png", on_gpu, outcomes)
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--variants", "torch,lger"], "unknown variant 'lger'; known: eager, torch, liger"),
        (["--dropout", "1.5"], "invalid probability in [0, 1) value: '1.5'"),
        (["--device", "cuda"], "torch finds no CUDA device"),
        (["--batsh", "3"], "did you mean --batch?"),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(flags, message, capsys):
    if "cuda" in flags and torch.cuda.is_available():
        flags, message = ["--blocks", "0"], "invalid positive int value"
    with pytest.raises(SystemExit) as stop:
        compare_hf.main(flags)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and message in error and error.count("\n") == 1


def test_every_claim_and_default_names_a_variant():
    from bench.hf_variants import CLAIMS, DEFAULT_VARIANTS

    assert {n for claim in CLAIMS for n in claim[:2]} <= set(DEFAULT_VARIANTS) <= set(VARIANTS)
