"""The benchmarks: statistics against known values, models, masks, workers, small runs."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from bench import compare, compare_hf, harness, report_ops, run_op
from bench.train import models, turns
from bench.train.subject import Subject, text_batches
from bench.train.turns import Plan, Team
from bench.train.variants import KINDS, LLAMA_SHAPES, Setting
from xtrain.model import Config, Transformer

ROOT = Path(__file__).resolve().parent.parent

SIZES = dict(preset="tiny", batch=2, seq=16, vocab=16)
TINY = Setting(**SIZES, dropout=0.1, device="cpu", dtype="fp32")
VARIANTS = KINDS["transformer"].variants


# --- statistics -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values, wanted",
    [
        ([3.0], (3.0, 3.0, 3.0)),
        (range(11), (2.0, 5.0, 8.0)),
        ([8.0, 1.0, 4.0, 2.0], (1.6, 3.0, 5.6)),
    ],
)
def test_percentiles_are_linear_between_neighbours(values, wanted):
    found = harness.Summary.of(list(values))
    assert (found.p20, found.p50, found.p80) == pytest.approx(wanted)
    assert found.count == len(values)


@pytest.mark.parametrize(
    "n, rank, coverage",
    # from the binomial table: 1 - 2 * P(Binomial(n, 1/2) < rank)
    [(7, 1, 0.984375), (9, 2, 0.9609375), (12, 3, 0.9614258), (20, 6, 0.9586105), (3, 1, 0.75)],
)
def test_median_interval_against_the_binomial_table(n, rank, coverage):
    values = np.random.default_rng(0).permutation(n).tolist()
    low, high, reached = harness.median_interval(values)
    assert (low, high) == (rank - 1, n - rank)
    assert reached == pytest.approx(coverage, abs=1e-7)


def test_median_interval_covers_as_often_as_it_says():
    """Every pattern of 9 draws above or below the median is equally likely: count them all."""
    found = [harness.median_interval(s) for s in itertools.product((-1.0, 1.0), repeat=9)]
    hits = sum(low <= 0 <= high for low, high, _ in found)
    assert hits / 2**9 == pytest.approx(found[0][2])


def test_block_ratio_divides_within_blocks():
    slow = [[[10.0, 20.0, 30.0], [30.0]], [[250.0], [250.0]], [[4.0], [4.0]]]  # 25, 250, 4
    fast = [[[10.0, 10.0, 99.0], [15.0]], [[100.0], [150.0]], [[1.0], [1.0]]]  # 12.5, 125, 1
    ratio = harness.block_ratio(slow, fast)  # the machine slowed down tenfold in between
    assert (ratio.median, ratio.low, ratio.high, ratio.coverage) == (2.0, 2.0, 4.0, 0.75)
    assert ratio.as_cost() == "100.0% [100.0, 300.0]"
    with pytest.raises(ValueError, match="same blocks"):
        harness.block_ratio(slow, fast[:2])


@pytest.mark.parametrize(
    "low, high, verdict",
    [(1.01, 1.2, "faster"), (0.8, 0.99, "slower"), (0.99, 1.01, "no measurable difference")],
)
def test_verdict(low, high, verdict):
    assert harness.Ratio(1.0, low, high, 0.96).verdict() == verdict


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_drift_cancels_within_a_block(n):
    """Each visit takes a unit more than the one before; all variants still come out equal."""
    names = "abcdef"[:n]
    for block in range(2 * n):
        visits = {name: [] for name in names}
        for clock, name in enumerate(harness.order_of_block(names, block)):
            visits[name].append([100.0 + clock])
        assert all(len(both) == 2 for both in visits.values())
        for name in names:
            assert harness.block_ratio([visits[name]], [visits["a"]]).median == 1.0


def test_orders_balance_positions_and_neighbours():
    """Over six blocks of six: each name once at each position, each after each other once."""
    names = "abcdef"
    halves = [harness.order_of_block(names, block)[:6] for block in range(6)]
    for position in range(6):
        assert sorted(half[position] for half in halves) == list(names)
    pairs = [pair for half in halves for pair in itertools.pairwise(half)]
    assert sorted(pairs) == sorted(itertools.permutations(names, 2))


# --- timing and memory ----------------------------------------------------------------------------


def test_times_are_milliseconds_of_each_call():
    naps = iter([0.02, 0.001, 0.04])
    times = harness.time_calls(lambda: time.sleep(next(naps)), 3, "cpu")
    assert times[0] >= 20 and times[2] >= 40 and times[1] < times[0]


def test_peak_counts_what_was_alive_at_the_same_time():
    before = torch.ones(1 << 20)

    def call():
        a = torch.empty(1 << 20, dtype=torch.uint8)
        b = torch.empty(1 << 21, dtype=torch.uint8)  # a and b: 3 MiB
        del a, b
        return torch.empty(1 << 21, dtype=torch.uint8)  # 2 MiB

    peak = harness.cpu_tensor_peak_bytes(call)
    assert 3 << 20 <= peak < (3 << 20) + 4096
    del before


def test_environment_names_commit_and_versions():
    found = harness.environment("cpu", commit="abc123")
    versions = {"commit": "abc123", "torch": torch.__version__, "gpu": "n/a"}
    assert found.items() >= (versions | {"cpu_threads": torch.get_num_threads()}).items()


def test_commit_of_a_checkout_and_of_none(tmp_path):
    def git(*words):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        return subprocess.check_output(["git", *identity, *words], cwd=tmp_path, text=True).strip()

    assert harness.git_commit(tmp_path).startswith("unknown")
    git("init", "-q")
    (tmp_path / "f").write_text("1")
    git("add", "f")
    git("commit", "-q", "-m", "one")
    assert git("rev-parse", "HEAD").startswith(harness.git_commit(tmp_path))
    (tmp_path / "f").write_text("2")
    assert harness.git_commit(tmp_path).endswith("-dirty")


# --- models, masks, workers -----------------------------------------------------------------------


def test_the_f_dropout_model_drops_both_branches():
    torch.manual_seed(0)
    model = Transformer(Config.preset("tiny"))
    tokens = torch.randint(16, (2, 8))
    everything = models.with_f_dropout(model, 1.0)(tokens)[0]
    assert torch.equal(everything, model.head(model.norm(model.embedding(tokens))))
    nothing = models.with_f_dropout(model, 0.0)(tokens)[0]
    assert torch.equal(nothing, model(tokens)[0])


def test_gpt2_drops_what_its_own_modules_drop():
    torch.manual_seed(0)
    setting = replace(TINY, model="gpt2", dropout=1.0)
    tokens = torch.randint(16, (2, 8))
    model = models.build(setting, VARIANTS["torch"])
    logits, loss = model(tokens, tokens)
    assert torch.equal(logits, model.head(model.norm(torch.zeros(2, 8, model.norm.weight.numel()))))
    assert loss.item() == pytest.approx(math.log(16), abs=1e-6)
    plain = models.build(setting, VARIANTS["torch-p0"])
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 16
    differs = (plain(tokens, tokens)[0] != plain(changed, tokens)[0]).any(-1)
    assert torch.equal(differs, (torch.arange(8) >= 5).expand(2, 8)), "it is causal"
    assert plain.head.weight is plain.embedding.weight


class InThisProcess(Team):
    """Variants without processes of their own, where nothing depends on them."""

    def __init__(self, setting, names):
        self.errors, self._workers = {}, {name: Subject(setting, name) for name in names}

    def ask_all(self, names, method, *args):
        return {name: getattr(self._workers[name], method)(*args) for name in names}

    def stop(self, *names):
        pass


def test_kernel_table_sorts_by_time(monkeypatch):
    monkeypatch.setattr(turns, "Team", InThisProcess)
    plan = Plan(("eager", "xtrain-eager"), 1, 1, 1)
    head, total, *rows = turns.kernel_table(replace(TINY, model="gpt2"), plan).splitlines()
    assert head.split() == ["eager", "ms", "calls", "xtrain-eager", "ms", "calls", "kernel"]
    longest = [max(map(float, row.split()[0:3:2])) for row in rows]
    assert longest == sorted(longest, reverse=True) and "aten::addmm" in "".join(rows)
    assert float(total.split()[0]) > longest[0] / 2 > 0


def test_the_f_dropout_model_recomputes_with_the_same_masks():
    """The strongest baseline must not be a wrong one: its gradients may not depend on recompute."""
    gradients = []
    for recompute in ("none", "full"):
        torch.manual_seed(0)
        model = models.with_f_dropout(Transformer(Config.preset("tiny", recompute=recompute)), 0.5)
        assert all(block.recomputed is (recompute == "full") for block in model.blocks)
        tokens = torch.randint(16, (2, 8))
        model(tokens, tokens)[1].backward()
        gradients.append([p.grad for p in model.parameters()])
    assert len(gradients[0]) == 21
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_probe_reads_the_oracles_masks(dtype, recompute):
    setting = replace(TINY, dtype=dtype, recompute=recompute)
    found = models.read_masks(VARIANTS["xtrain-eager"], setting)
    assert found["forward"] == found["backward"] == found["expected"]
    assert len(set(found["expected"])) == 2 * 2 * models.PROBE_STEPS


def test_probe_tells_other_masks_apart():
    eager = models.read_masks(VARIANTS["eager"], TINY)
    assert eager["forward"] == eager["backward"]
    assert not set(eager["forward"]) & set(eager["expected"])
    assert models.read_masks(VARIANTS["eager"], TINY) == eager, "same seed, same masks"
    without = replace(VARIANTS["xtrain-p0"], options={"backend": "eager"})
    found = models.read_masks(without, replace(TINY, dropout=0.5))
    assert len(set(found["backward"])) == 1, "everything is kept"


def test_a_step_is_a_plain_training_step_of_transformers():
    shape = LLAMA_SHAPES["tiny"]
    sizes = dict(batch=shape.batch, seq=shape.seq, vocab=shape.vocab_size, learning_rate=1e-3)
    setting = replace(TINY, model="llama", shape=shape, **sizes)
    subject = Subject(setting, "eager")
    found = [subject.step().item() for _ in range(3)]
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape.sizes)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for loss, ids in zip(found, text_batches(setting), strict=False):
        logits = model(ids[:, :-1]).logits[:, :-1]
        right = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:-1].flatten())
        assert loss == pytest.approx(right.item(), rel=1e-5)
        optimizer.zero_grad()
        right.backward()
        optimizer.step()


def test_a_worker_that_fails_dies_or_hangs_drops_out_alone():
    with Team(TINY, ["eager", "eager-p0"]) as team:
        assert set(team.ask_all(["eager", "eager-p0"], "ready")) == {"eager", "eager-p0"}
        assert team.ask("eager", "no_such_question") is None
        assert "no_such_question: AttributeError" in team.errors["eager"]
        worker = team._workers["eager-p0"]
        worker.send("first_steps", 3)
        with pytest.raises(RuntimeError, match="no answer within 0 s"):
            worker.receive("first_steps", timeout_s=0.001)
        assert "eager-p0" not in team.errors
        worker._process.kill()
        assert team.ask("eager-p0", "ready") is None
        assert "ended (exit code -9)" in team.errors["eager-p0"]


# --- command lines --------------------------------------------------------------------------------


def call(*words):
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("script", ["compare.py", "compare_hf.py", "run_op.py", "report_ops.py"])
def test_help_answers_without_torch(script):
    done = call("-X", "importtime", f"bench/{script}", "--help")
    assert done.returncode == 0 and "--markdown" in done.stdout
    assert " torch\n" not in done.stderr


@pytest.mark.parametrize(
    "main, flags, message",
    [
        (compare.main, ["--variants", "torch,magic"], "variant 'magic'; known: eager, torch"),
        (compare.main, ["--preset", "huge"], "invalid choice: 'huge'"),
        (compare.main, ["--dropout", "1.5"], r"invalid probability in [0, 1) value: '1.5'"),
        (compare.main, ["--batch", "0"], "invalid positive int value: '0'"),
        (compare.main, ["--device", "tpu"], "--device must be cuda, cuda:N or cpu, got 'tpu'"),
        (compare.main, ["--recompute", "9", "--preset", "tiny"], "recompute must be"),
        (compare.main, ["--blokcs", "9"], "did you mean --blocks"),
        (compare_hf.main, ["--variants", "lger"], "'lger'; known: eager, torch, liger"),
        (compare_hf.main, ["--batsh", "3"], "did you mean --batch?"),
        (run_op.main, ["conv"], "invalid choice: 'conv'"),
        (report_ops.main, ["--ops", "dropout,conv"], "unknown op 'conv'; known: dropout, "),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(main, flags, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(flags)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="--device cuda: torch finds no CUDA device"):
        harness.device_of("cuda")


def test_the_command_to_reproduce_names_no_files():
    words = ["--json", "a b.json", "--steps", "3", "--markdown=x.md", "--variants", "eager,torch"]
    assert harness.command_line("bench/compare.py", words) == (
        "python bench/compare.py --steps 3 --variants eager,torch"
    )


def test_compare_end_to_end(tmp_path):
    flags = "--preset tiny --batch 2 --seq 16 --device cpu --blocks 2 --steps 2 --seed 3".split()
    flags += ["--variants", "eager,xtrain-eager", "--json", str(tmp_path / "r.json")]
    done = call("bench/compare.py", *flags, "--markdown", str(tmp_path / "r.md"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("xtrain eager, dropout"), "the table comes last"
    found = json.loads((tmp_path / "r.json").read_text())["data"]["variants"]
    assert set(found) == {"eager", "xtrain-eager"}
    for row in found.values():
        assert row["error"] is None and row["num_recompiles"] == 0
        lengths = [[len(times) for times in visits] for visits in row["blocks_ms"]]
        assert lengths == [[2, 2], [2, 2]]
        assert len(row["losses"]) == 10 and all(2 < loss < 4 for loss in row["losses"])  # ln 16
        # weights, two moments: 21,664 numbers each; the rest of a step comes on top
        assert 3 * 4 * 21664 < row["peak_memory_gib"] * 2**30 < 3e6
    masks = found["xtrain-eager"]["masks"]
    assert masks["forward"] == masks["backward"] == masks["expected"]
    text = (tmp_path / "r.md").read_text()
    assert "--seed 3" in text and str(tmp_path) not in text


def test_compare_hf_end_to_end(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(turns, "Team", InThisProcess)
    files = {name: tmp_path / f"out.{name}" for name in ("json", "markdown", "plot")}
    flags = [f"--{name}={path}" for name, path in files.items()]
    assert compare_hf.main(["--variants", "eager", "--blocks", "1", "--shape", "tiny", *flags]) == 0
    variant = json.loads(files["json"].read_text())["data"]["variants"]["eager"]
    assert len(variant["losses"]) == 4 + 2 * (1 + 2), "first steps and two visits"
    assert variant["losses"][-1] < variant["losses"][0] and variant["num_recompiles"] == 0
    assert files["plot"].read_bytes().startswith(b"\x89PNG")
    assert "| transformers" in files["markdown"].read_text()
    assert "transformers" in capsys.readouterr().out
