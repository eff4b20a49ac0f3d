"""The benchmarks of single ops: what is checked before timing, turns, targets, report, plot."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from bench import ops as bench_ops
from bench import report_ops, run_op
from bench.ops import FAMILIES, bench_of, bench_residual
from bench.ops import report as op_report
from bench.ops import timing as op_timing
from bench.ops.common import (
    BEST_OTHER,
    COPY,
    INDUCTOR,
    LIGER,
    OURS,
    SEE_THROUGH,
    Case,
    NotThere,
    Provider,
    Target,
    Yardstick,
    liger,
    truth_by,
)
from bench.ops.timing import Measured, Plan, Timed, measure_case
from xtrain.ops import OPS

CPU = torch.device("cpu")
BENCHES = {op: bench_of(op) for op in FAMILIES}
MEASURED_WITH = {"rope": "rope_qk", "swiglu_packed": "swiglu", "geglu_packed": "geglu"}
MEASURED_WITH |= {"cross_entropy": None}
CASE = Case("stream", (32768, 4096), torch.bfloat16)


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for a core make calls of microseconds take milliseconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- the benchmarks -------------------------------------------------------------------------------


def test_every_op_has_a_benchmark():
    wanted = {MEASURED_WITH.get(op, op) for op in OPS} - {None}
    assert wanted <= BENCHES.keys()


@pytest.mark.parametrize("op", BENCHES)
def test_plain_pytorch_and_the_truth_agree(op):
    """Two spellings of one formula: in fp64 they differ by roundings of fp64 alone."""
    bench = BENCHES[op]
    case = bench.cases["cpu"][0]
    inputs = bench.make_inputs(case, CPU)
    part = inputs.map(lambda t: bench.part(case, t))
    truth = bench.truth(case, part) if bench.truth else truth_by(bench.plain(case), part)
    if op in ("rms_norm", "dropout_add_rms_norm", "linear_cross_entropy"):  # spelled with fp32
        yardstick = Yardstick.of(bench, case, inputs)
        scales = [float(t.abs().max()) for t in truth]
        for error, scale in zip(yardstick.plain_errors, scales, strict=True):
            assert error < 0.05 * scale, "bf16 roundings, no more"
        return
    results = op_timing.forward_and_backward(bench.plain(case), part.double())
    for result, right in zip(results, truth, strict=True):
        torch.testing.assert_close(result, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "op, case, mode, tensors",
    [  # in tensors of the case's size and dtype; bf16 next to fp32 counts half
        ("dropout", 0, "both", 4),
        ("dropout_add_rms_norm", 0, "forward", 4),
        ("dropout_add_rms_norm", 0, "both", 9),
        ("dropout_add_rms_norm", 5, "both", 6 + 8),  # an fp32 stream
        ("rms_norm", 0, "both", 5),
        ("swiglu", 0, "both", 8),
        ("swiglu", 1, "both", 8),
        ("geglu", 0, "both", 8),
        ("geglu", 1, "forward", 3),
    ],
)
def test_bytes_of_the_floor(op, case, mode, tensors):
    bench = BENCHES[op]
    case = bench.cases["cuda"][case]
    assert bench.num_bytes(case, mode) == tensors * 2 * case.shape[0] * case.shape[1]


def test_bytes_of_rope_and_flops_of_the_products():
    rope, loss, sdpa = BENCHES["rope_qk"], BENCHES["linear_cross_entropy"], BENCHES["sdpa"]
    heads, tables = 8 * 2048 * (32 + 8) * 128 * 2, 2 * 2048 * 64 * 4
    assert rope.num_bytes(rope.cases["cuda"][0], "both") == 4 * heads + 2 * tables
    assert loss.num_flops(loss.cases["cuda"][0], "both") == 6 * 16384 * 2048 * 50304
    assert sdpa.num_flops(sdpa.cases["cuda"][1], "forward") == 4 * 4 * 32 * 4096**2 * 128 // 2


# --- the check before timing ----------------------------------------------------------------------


def checked(op, **providers):
    bench = replace(BENCHES[op], providers=providers)
    rows = measure_case(bench, bench.cases["cpu"][0], CPU, Plan(num_blocks=1))
    return {row.provider: row for row in rows if row.mode == "both"}


def test_wrong_results_are_not_timed():
    rows = checked(
        "swiglu",
        right=Provider(lambda case: lambda gate, up: F.silu(gate) * up),
        wrong=Provider(lambda case: lambda gate, up: gate * F.silu(up)),
        wrong_gradient=Provider(lambda case: lambda gate, up: F.silu(gate) * up.detach() + 0 * up),
        raises=Provider(lambda case: lambda gate, up: gate @ up),
    )
    assert rows["right"].is_timed and rows["right"].error_ratio == 1.0
    assert rows["right"].peak_bytes > 0 and rows["right"].first_call_s > 0
    assert "against fp64, plain PyTorch's is" in rows["wrong"].error
    assert rows["wrong_gradient"].error.startswith("result 2")
    assert rows["raises"].error.startswith("RuntimeError: mat1 and mat2")
    assert not any(rows[name].blocks for name in ("wrong", "wrong_gradient", "raises"))


def test_own_masks_are_held_to_themselves():
    rows = checked(
        "dropout",
        torchs=Provider(bench_residual.torchs_own, own_mask=True),
        rate=Provider(lambda case: lambda x, *_: F.dropout(x, 0.11), own_mask=True),
        two_masks=Provider(lambda case: TwoMasks.apply, own_mask=True),
    )
    assert rows["torchs"].is_timed
    assert rows["rate"].error.startswith("keeps 0.8")
    assert rows["two_masks"].error == "forward and backward masks differ"


class TwoMasks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seed, offset):
        return F.dropout(x, 0.1)

    @staticmethod
    def backward(ctx, grad):
        return F.dropout(grad, 0.1), None, None


def test_own_masks_of_the_fused_op():
    def without_norm(x, residual, weight, seed, offset):
        h = residual + F.dropout(x, 0.1)
        return h, h * weight

    rows = checked(
        "dropout_add_rms_norm",
        torchs=Provider(bench_residual.torchs_three, own_mask=True),
        without_norm=Provider(lambda case: without_norm, own_mask=True),
    )
    assert rows["torchs"].is_timed
    assert rows["without_norm"].error.startswith("the norm is wrong by")


def test_a_provider_that_writes_over_its_inputs_gets_its_own():
    def writes(gate, up):
        out = F.silu(gate.clone()) * up.clone()
        gate.data.zero_()
        return out

    providers = {"writes": Provider(lambda case: writes, mutates=True)}
    bench = replace(BENCHES["swiglu"], providers=providers)
    run = op_timing.CaseRun(bench, bench.cases["cpu"][0], CPU, Plan(num_blocks=1))
    run.check()
    before = run.inputs.clone()
    run.time("forward")
    assert run.rows["forward", "writes"].is_timed
    assert all(map(torch.equal, run.inputs.tensors, before.tensors))


def test_what_is_missing_says_why():
    def missing(case):
        raise NotThere("not written yet")

    rows = checked("swiglu", missing=Provider(missing))
    assert rows["missing"].missing == "not written yet" and rows["missing"].error is None
    with pytest.raises(NotThere, match="liger-kernel is not installed"):
        liger("no_such_module", "f")


def test_a_case_that_fails_leaves_rows_behind():
    def no_inputs(case, device):
        raise RuntimeError("out of memory")

    bench = replace(BENCHES["swiglu"], make_inputs=no_inputs)
    rows = bench_ops.measure(bench, CPU, Plan(num_blocks=1), quick=True)
    assert [row.error for row in rows] == ["RuntimeError: out of memory"] * 2


# --- turns ----------------------------------------------------------------------------------------


def test_calls_take_turns_over_copies_of_their_tensors():
    calls = []
    timed = Timed(CPU, calls.append, ["a", "b", "c"], capture=False)
    calls.clear()
    (first, *_) = timed.visit()
    assert len(calls) == timed.num_calls * (1 + timed.num_samples)
    assert calls[:6] == ["a", "b", "c", "a", "b", "c"] and first > 0


def test_as_many_copies_as_make_the_cache_useless():
    assert op_timing.num_copies(10, op_timing.l2_bytes(CPU)) == 1
    sizes = (1000, 200, 199, 100, 30)
    assert [op_timing.num_copies(size, 50) for size in sizes] == [1, 1, 2, 2, 7]


# --- the report, from made-up measurements --------------------------------------------------------


def made_up(provider, ms, mode="both", **changes):
    row = Measured("norm", CASE, mode, provider, num_bytes=4_000_000_000, peak_bytes=3 << 29)
    row.blocks = [[[t], [t]] for t in (ms if isinstance(ms, list) else [ms] * 7)]
    return replace(row, **changes)


DRIFT = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]


@pytest.mark.parametrize(
    "target, rows, verdict",
    [
        # against copy: a share of its bandwidth
        (
            Target.near_copy(92),
            [made_up(OURS, 1.25), made_up(COPY, 1.0)],
            [
                "<= 1.087 x copy",
                "1.250 [1.250, 1.250] = 80.0% [80.0, 80.0] of copy",
                "missed by 15.0%",
            ],
        ),
        (Target.near_copy(92), [made_up(OURS, 1.08), made_up(COPY, 1.0)], ["met, by 1%"]),
        # ratios are formed block by block
        (
            Target("never slower", 1.02, INDUCTOR),
            [made_up(OURS, DRIFT), made_up(INDUCTOR, [2 * t for t in DRIFT])],
            ["0.500 [0.500, 0.500]", "met, by 51%"],
        ),
        # the best other is neither copy nor the provider itself
        (
            Target("within 2%", 1.02, BEST_OTHER),
            [made_up(OURS, 3.0), made_up("a", 2.0), made_up("b", 1.5), made_up(COPY, 1.0)],
            ["<= 1.020 x b", "2.000 [2.000, 2.000]", "missed by 96.1%"],
        ),
        (Target("peak", 1.65), [made_up(OURS, 1.0)], ["<= 1.65 GiB", "1.5 GiB", "met, by 9%"]),
        (Target("peak", 0.75), [made_up(OURS, 1.0)], ["missed by 100.0%"]),
        # what was not measured is neither met nor missed
        (
            Target("never slower", 1.02, LIGER),
            [made_up(OURS, 1.0), made_up(LIGER, 1.0, blocks=[], missing="not installed")],
            ["Liger: not installed", "not measured"],
        ),
        (
            Target("peak", 1.0),
            [made_up(OURS, 1.0, error="wrong")],
            ["xtrain: wrong", "not measured"],
        ),
    ],
)
def test_targets(target, rows, verdict):
    claim, *found = op_report.check("norm", target, rows[0], op_report.Rows(rows))
    assert claim == f"norm, stream [32768, 4096] bf16, both: xtrain {target.claim}"
    assert found[-len(verdict) :] == verdict


def test_the_better_form_needs_an_interval_without_doubt():
    def better(ours, see_through, **changes):
        rows = op_report.Rows([made_up(OURS, ours, **changes), made_up(SEE_THROUGH, see_through)])
        return op_report.form_rows(rows)[0][3]

    assert better(1.0, 2.0) == "kernel"
    assert better(2.0, 1.0) == "decomposition"
    assert better([1.0, 3.0] * 4, [2.0] * 8) == "either"
    assert better(1.0, 2.0, note="runs the decomposition: fp64") == (
        "no kernel: runs the decomposition: fp64"
    )


def test_rates_and_ratios_of_a_row_and_ours_at_a_glance():
    measured = [made_up(OURS, 1.25), made_up(COPY, 1.0), made_up(INDUCTOR, 2.5)]
    rows = op_report.Rows(measured)
    cells = op_report.table_row(rows, measured[0], (INDUCTOR, LIGER))
    shares, ratio = "80.0% [80.0, 80.0]", "0.500 [0.500, 0.500]"
    assert cells[3:9] == ["1,250 [1,250, 1,250]", "3,200 GB/s", shares, ratio, "n/a", "1.5"]
    assert op_report.rate(replace(measured[0], num_flops=10**12), 1250.0) == "800 TFLOP/s"
    more = [*measured, made_up(LIGER, 5.0), made_up(OURS, 0.5, mode="forward")]
    (glance,) = op_report.glance_rows(op_report.Rows(more))
    name, best = "norm, stream [32768, 4096] bf16", f"inductor: {ratio}"
    assert glance == [name, "1,250", "3,200 GB/s", "80%", "0.50", "0.25", best, "1.5"]


# --- the command lines ----------------------------------------------------------------------------


def test_report_ops_end_to_end(tmp_path, capsys):
    flags = ["--quick", "--device", "cpu", "--blocks", "2", "--providers", "eager,xtrain"]
    files = [str(tmp_path / f"r.{kind}") for kind in ("json", "md", "png")]
    paths = ["--json", files[0], "--markdown", files[1], "--plot", files[2]]
    assert report_ops.main([*flags, *paths]) == 0, capsys.readouterr().out
    lines = Path(files[0]).read_text().splitlines()
    found = json.loads("".join(lines))
    rows = found["data"]["rows"]
    assert {row["op"] for row in rows} == set(BENCHES) and len(lines) == len(rows) + 1
    for row in rows:
        assert row["error"] is None
        assert row["missing"] or row["time_us"]["p20"] <= row["time_us"]["p50"]
        assert row["missing"] or [len(block) for block in row["visits_us"]] == [2, 2]
    ours = [row for row in rows if row["provider"] == "xtrain" and not row["missing"]]
    assert {row["op"] for row in ours} >= set(OPS) & set(BENCHES)
    assert all(row["error_ratio"] <= 2 for row in ours)
    text = Path(files[1]).read_text()
    parts = ["Question", "Result", "Setup", "Method", "Table", "Reproduce", "Limits"]
    positions = [text.index(f"**{part}.**") for part in parts]
    assert positions == sorted(positions) and all(f"### {op}" in text for op in BENCHES)
    assert "report_ops.py --quick --device cpu" in text and str(tmp_path) not in text
    assert Path(files[2]).read_bytes()[:4] == b"\x89PNG"


def test_a_limit_on_time_leaves_rows_that_say_so():
    rows = bench_ops.measure(BENCHES["swiglu"], CPU, Plan(num_blocks=1), quick=True, end=0.0)
    assert [row.missing for row in rows] == ["the time limit of the run was reached before"] * 2


def test_filling_the_caches_says_what_went_wrong():
    (problem,) = op_timing.fill_caches([("sdpa", 0), ("conv", 0)], "cpu", 1)
    assert problem == "conv, case 0: KeyError: 'conv'"


def test_run_op_says_by_its_exit_code_that_a_provider_failed(monkeypatch, capsys):
    wrong = {"wrong": Provider(lambda case: lambda gate, up: gate + up)}
    monkeypatch.setattr(BENCHES["swiglu"], "providers", wrong)
    assert run_op.main("swiglu --device cpu --quick --blocks 1".split()) == 1
    assert "failed: result" in capsys.readouterr().out


def test_a_plot_of_nothing_is_no_file(tmp_path):
    op_report.draw([], tmp_path / "r.png", "nothing")
    assert not (tmp_path / "r.png").exists()
