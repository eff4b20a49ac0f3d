"""--drift-every: fingerprints that leave the run alone and name where two runs part."""

from __future__ import annotations

import contextlib
import json
import random
import shutil

import pytest
import torch
import xxhash
from drift_models import Rowwise
from forge import damage_files, damage_json, damage_text, put
from torch import nn
from training import running

from xtrain.config import ConfigError, RunConfig
from xtrain.drift import DriftError
from xtrain.drift.cli import main
from xtrain.drift.comparison.two_runs import compare_training
from xtrain.drift.recording.training_steps import TrainingFingerprints
from xtrain.ops.dropout.op import dropout_reference
from xtrain.rng import site_seed
from xtrain.training import loop


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One configuration twice, once without fingerprints, and with one setting changed each."""
    folder = tmp_path_factory.mktemp("training")
    shared = ("--steps=3", "--dropout=0.1", "--set=train.micro_batch_size=2")
    every = "--drift-every=2"
    with running(folder) as runner:
        for name, *flags in (
            ("plain",),
            ("a", every),
            ("b", every),
            ("eps", every, "--set=model.norm_eps=2e-6"),
            ("rate", every, "--set=optim.learning_rate=2e-3"),
            ("dropout", every, "--dropout=0.2"),
            ("seed", every, "--set=train.seed=1"),
            ("micro", every, "--set=train.micro_batch_size=4"),
        ):
            assert runner(f"--name={name}", *shared, *flags) == 0
        losses = {name: runner.losses(name) for name in ("plain", "a", "b")}
    return folder / "runs", losses


def test_fingerprints_leave_the_run_alone(runs):
    """E1: the same losses bit for bit, with and without."""
    _, losses = runs
    assert losses["plain"] == losses["a"] == losses["b"] and len(losses["a"]) == 3


def test_a_run_that_nothing_watches_is_refused_where_it_should_be_watched():
    config = RunConfig().override({"run.drift_every": 2})
    with pytest.raises(ConfigError, match="run.drift_every is 2 and nothing watches the steps"):
        loop.train(config)


def test_two_equal_runs_are_identical(runs, capsys):
    folder, losses = runs
    assert main(["compare", str(folder / "a"), str(folder / "b")]) == 0
    assert "identical: all bits of" in capsys.readouterr().out
    found = compare_training(folder / "a", folder / "b" / "drift")
    assert [(rank, step) for rank, step, *_ in found.losses] == [(0, 0), (0, 2)]
    assert [loss for *_, loss in found.losses] == losses["a"][::2]
    steps = [
        json.loads(p.read_text()) for p in sorted((folder / "a/drift/rank_0000").glob("step_*"))
    ]
    kinds = [row[0] for row in steps[0]["rows"]]
    order = ["input", "weight", "op", "mask", "loss", "gradient norm", "gradient", "weight"]
    assert list(dict.fromkeys(kinds)) == order[:-1] and kinds[-1] == "weight"
    ops = {(row[1], row[2]) for row in steps[0]["rows"] if row[0] == "op"}
    assert ("blocks.0.attention.query", "aten.mm") in ops
    assert ("blocks.0.attention.query (backward)", "aten.mm") in ops
    assert ("embedding (backward)", "aten.embedding_dense_backward") in ops


def test_masks_are_those_of_seed_step_and_site(runs):
    """Against the reference: the first decisions of every site, anew in each step."""
    folder, _ = runs
    found = {}
    for step in (0, 2):
        path = folder / f"a/drift/rank_0000/step_{step:08d}.json"
        rows = json.loads(path.read_text())["rows"]
        found |= {(step, row[1]): (row[4], row[5]) for row in rows if row[0] == "mask"}
    expected = {}
    for step in (0, 2):
        for site in ("attention", "feed_forward"):  # of the only block
            seed = site_seed(0, step, 0, site)
            kept = dropout_reference(torch.ones(4096), 0.1, seed) > 0
            mark = xxhash.xxh3_128_hexdigest(kept.numpy().tobytes())
            expected[step, f"blocks.0.{site}"] = ([4096], mark)
    assert found == expected and len({mark for _, mark in found.values()}) == 4


@pytest.mark.parametrize(
    ("name", "code", "kind", "where", "op"),
    [
        ("eps", 1, "op", "blocks.0.attention_norm", "aten.add"),  # an op of the first forward
        ("dropout", 1, "mask", "blocks.0.attention", ""),  # no op of the plain model
        ("rate", 1, "weight", "embedding.weight", "after the step"),  # loss and gradients equal
        ("seed", 4, "input", "tokens", ""),
    ],
)
def test_the_first_difference(runs, name, code, kind, where, op):
    folder, _ = runs
    found = compare_training(folder / "a", folder / name)
    first = found.first_divergence
    assert (first.step, first.rank, first.kind) == (0, 0, kind)
    assert (first.module_path, first.op) == (where, op) and found.exit_code == code


def test_the_setting_behind_a_difference_is_named(runs, tmp_path, capsys):
    folder, _ = runs
    page = tmp_path / "page.html"
    assert main(["compare", str(folder / "a"), str(folder / "rate"), "--html", str(page)]) == 1
    text = capsys.readouterr().out
    assert "configuration.optim.learning_rate is 0.01 in A, 0.002 in B" in text
    assert "optim.learning_rate" in page.read_text()
    cause = compare_training(folder / "a", folder / "rate").first_divergence.cause
    assert cause == "configuration.optim.learning_rate is 0.01 in A, 0.002 in B"
    assert not compare_training(folder / "a", folder / "b").changes


def test_other_micro_batches_are_said_and_their_ops_not_compared(runs, capsys):
    folder, _ = runs
    found = compare_training(folder / "a", folder / "micro")
    assert found.micro_batches and found.exit_code in (0, 1) and not found.num_unmatched
    first = found.first_divergence
    assert (
        first is None or first.kind in ("loss", "gradient", "gradient norm") and first.size < 1e-5
    )
    main(["compare", str(folder / "a"), str(folder / "micro")])
    assert "the micro-batches differ ([2, " in capsys.readouterr().out


class Sums(nn.Module):
    """Products of one name in one module, one of them by 1 or by something else in between."""

    def __init__(self, factor=None):
        super().__init__()
        self.model, self.factor = Rowwise(), factor

    def forward(self, inputs, targets, return_logits=False):
        logits = self.model(inputs) * 1.5
        if self.factor is not None:
            logits = logits * self.factor
        logits = logits * 2.5
        return None, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Bent(torch.autograd.Function):
    """The identity, with a gradient that is multiplied by something."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class Bend(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = 1.0

    def forward(self, x):
        return Bent.apply(x, self.factor)


class Trained(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Rowwise()
        self.bend = Bend()

    def forward(self, inputs, targets, return_logits=False):
        logits = self.bend(self.model(inputs))
        return None, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


X = torch.arange(12).reshape(2, 6)


def fingerprints(folder, model, **keywords):
    return TrainingFingerprints(folder, model, every=1, autocast=contextlib.nullcontext, **keywords)


def one_step(folder, model, **keywords):
    """The fingerprints of a step that does nothing."""
    recorder = fingerprints(folder, model, **keywords)
    recorder.before(0, X, X + 1)
    recorder.after(0, 1.0, 1.0)
    return folder


def train(folder, *, bent_at=None, steps=4, ranks=1):
    """A few steps of plain SGD; from step bent_at on the backward of one op differs."""
    for rank in range(ranks):
        model = Trained()
        recorder = fingerprints(folder, model, rank=rank)
        for step in range(steps):
            here = bent_at is not None and (rank, step) >= bent_at
            model.bend.factor = 1.0 + 2.0**-20 if here else 1.0
            sgd(model, recorder, step, X, X + 1)
    return folder


def sgd(model, recorder, step, x, targets, rate=0.1):
    recorder.before(step, x, targets)
    assert all(p.grad is None for p in model.parameters())
    _, loss = model(x, targets)
    loss.backward()
    recorder.after(step, loss.item(), 1.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= rate * parameter.grad
            parameter.grad = None


def test_one_ulp_of_the_optimiser_state_is_the_first_difference(tmp_path):
    found = []
    for name, value in (("a", 0.5), ("b", 0.5000001)):
        state = {"model.weight/exp_avg_sq": torch.full((3,), value)}
        found.append(one_step(tmp_path / name, Trained(), optimizer_state=lambda s=state: s))
    first = compare_training(*found).first_divergence
    assert (first.kind, first.module_path) == ("optimizer", "model.weight/exp_avg_sq")


def test_weights_drawn_under_another_cpu_capability_say_how_to_start_alike(tmp_path, monkeypatch):
    for name, capability in (("a", "AVX2"), ("b", "DEFAULT")):
        monkeypatch.setattr(
            "xtrain.drift.recording.training_steps.collect",
            lambda capability=capability: {"torch.aten_cpu_capability": capability},
        )
        model = Trained()
        with torch.no_grad():
            next(model.parameters()).add_(float(name == "b"))
        one_step(tmp_path / name, model)
    found = compare_training(tmp_path / "a", tmp_path / "b")
    assert found.exit_code == 4 and "AVX2 in A, DEFAULT in B" in found.reason
    assert "--resume RUN" in found.reason


def test_an_extra_op_is_listed_and_takes_no_partner(tmp_path, capsys):
    plain, one, more = (
        one_step(tmp_path / str(factor), Sums(factor)) for factor in (None, 1.0, 1.25)
    )
    found = compare_training(plain, one)
    assert found.exit_code == 0 and found.num_unmatched == 2  # forward and backward
    assert main(["compare", str(plain), str(one)]) == 0
    assert "  aten.mul of the model in B alone\n" in capsys.readouterr().out
    first = compare_training(plain, more).first_divergence
    assert (first.module_path, first.op) == ("", "aten.mul")
    assert first.cause == "it reads aten.mul of the model, which B alone has"


def test_step_rank_and_backward_op_are_named(tmp_path, capsys):
    """Row C58: one op of one rank goes another way, once."""
    a = train(tmp_path / "a", ranks=2)
    b = train(tmp_path / "b", ranks=2, bent_at=(1, 2))
    found = compare_training(a, b)
    first = found.first_divergence
    assert (first.step, first.rank, first.last_equal) == (2, 1, 1)
    assert (first.module_path, first.op) == ("bend (backward)", "aten.mul")
    assert first.size > 0 and found.exit_code == 1
    assert main(["compare", str(a), str(b)]) == 1
    text = capsys.readouterr().out
    assert "step 2, rank 1: aten.mul in bend (backward)" in text
    assert "step 1 was equal in everything" in text
    assert main(["compare", str(a), str(b), "--json", "-"]) == 1
    assert json.loads(capsys.readouterr().out)["first_divergence"]["rank"] == 1


def test_a_continued_run_writes_its_later_steps_anew(tmp_path):
    folder = train(tmp_path / "a")
    fingerprints(folder, Trained(), first_step=2)
    names = sorted(path.name for path in (folder / "rank_0000").iterdir())
    assert names == ["start.json", "step_00000000.json", "step_00000001.json"]


def test_not_comparable_and_damaged(tmp_path, capsys):
    a, b = train(tmp_path / "a", steps=1), train(tmp_path / "b", steps=1, ranks=2)
    assert "A has 1 ranks, B has 2" in compare_training(a, b).reason
    fingerprints(tmp_path / "c", Trained())
    assert "no step was recorded in both" in compare_training(a, tmp_path / "c").reason
    with pytest.raises(DriftError, match="holds no fingerprints; train with --drift-every"):
        compare_training(a, tmp_path)
    file = a / "rank_0000" / "step_00000000.json"
    text = file.read_text()
    for broken, message in (
        (text[: len(text) // 2], "is damaged"),
        (text.replace('"step": 0', '"step": 1'), "was changed after it was written"),
        ("[]", "is damaged"),
    ):
        file.write_text(broken)
        assert main(["compare", str(a), str(a)]) == 5
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1


# --- edited with their checksums: one line, or a verdict -----------------------------------------


STEP = "rank_0000/step_00000001.json"
START = "rank_0000/start.json"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("training") / "a", ranks=2, steps=2)


def redo_checksum(path, values):
    """Write values with the checksum that fits them; the format in the test's own words."""
    if isinstance(values, dict):
        values.pop("xxh3_128", None)
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
        values = {**values, "xxh3_128": xxhash.xxh3_128_hexdigest(text.encode())}
    path.write_text(json.dumps(values))


def edited(run, folder, name, edit):
    shutil.copytree(run, folder)
    values = json.loads((folder / name).read_text())
    edit(values)
    redo_checksum(folder / name, values)
    return folder


FORGED = [
    (STEP, put(0, "step"), "is of step 0, rank 0"),
    (STEP, put(1, "rank"), "is of step 1, rank 1"),
    (STEP, put(None, "rows"), "rows is None"),
    (STEP, put([1, 2], "rows", 0), "rows is [[1, 2]"),
    (STEP, put("F99", "rows", 0, 3), "rows is"),
    (STEP, put([-1], "rows", 0, 4), "rows is"),
    (STEP, put(["x"] * 4, "rows", 0, 6), "rows is"),
    (STEP, put("much", "loss"), "loss is 'much'"),
    (STEP, put(123.0, "rows", 0, 6, 0), "the runs contradict each other"),
    (START, put(2, "version"), "has schema version 2, this xtrain reads 1"),
    (START, put([], "environment"), "environment is []"),
    (START, put([3], "weights"), "weights is [3]"),
    ("rank_0001/start.json", put(0, "rank"), "rank is 0, not 1"),
]


@pytest.mark.parametrize(("name", "edit", "message"), FORGED, ids=range(len(FORGED)))
def test_a_forged_file_is_one_line(run, tmp_path, capfd, name, edit, message):
    forged = edited(run, tmp_path / "b", name, edit)
    for pair in ((run, forged), (forged, run)):
        assert main(["compare", *map(str, pair)]) == 5
        said = capfd.readouterr().err
        assert said.count("\n") == 1 and message in said


def test_a_missing_step_row_or_rank_is_said(run, tmp_path, capfd):
    shorter = tmp_path / "shorter"
    shutil.copytree(run, shorter)
    for rank in range(2):
        (shorter / f"rank_{rank:04d}" / "step_00000001.json").unlink()
    found = compare_training(run, shorter)
    assert found.exit_code == 0 and found.alone == ([1], [])
    main(["compare", str(run), str(shorter)])
    assert "recorded by A alone: steps 1\n" in capfd.readouterr().out
    fewer = edited(run, tmp_path / "fewer", STEP, lambda values: values["rows"].pop(5))
    assert compare_training(run, fewer).num_unmatched == 1
    main(["compare", str(run), str(fewer)])
    assert "without a partner, not compared: 1 results\n" in capfd.readouterr().out
    shutil.rmtree(fewer / "rank_0001")
    assert main(["compare", str(run), str(fewer)]) == 4
    shutil.move(shorter / "rank_0001", shorter / "rank_0002")
    assert main(["compare", str(run), str(shorter)]) == 5
    assert "rank_0001 is missing" in capfd.readouterr().err


def test_other_files_are_none_of_a_run(run, tmp_path):
    copied = tmp_path / "b"
    shutil.copytree(run, copied)
    for name in ("step_00000000 copy.json", "step_x.json", "notes.txt"):
        (copied / "rank_0000" / name).write_text("{}")
    assert compare_training(run, copied).exit_code == 0


@pytest.mark.parametrize("seed", range(2))
def test_no_damage_ends_in_an_internal_error(run, tmp_path, capfd, seed):
    rng = random.Random(seed)
    for turn in range(60):
        forged = tmp_path / "b"
        shutil.rmtree(forged, ignore_errors=True)
        shutil.copytree(run, forged)
        path = rng.choice(sorted(forged.glob("rank_*/*.json")))
        kind = rng.random()
        if kind < 0.1:
            damage_files(path, rng)
        elif kind < 0.2:
            damage_text(path, rng)
        else:
            values = json.loads(path.read_text())
            damage_json(values, rng)
            redo_checksum(path, values)
        pair = (run, forged) if rng.random() < 0.5 else (forged, run)
        code = main(["compare", *map(str, pair), "--json", str(tmp_path / "x.json")])
        said = capfd.readouterr().err
        assert 0 <= code <= 5 and said.count("\n") == (code == 5), (seed, turn, path.name, said)


# --- row C58 on a GPU: atomics are named where two runs part, and gone with determinism on --------

VOCAB, TOKENS, PAIRS = 16, 1 << 15, 5


class Gathered(nn.Module):
    """A bigram model by gather, whose backward adds thousands of gradients to each weight."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(VOCAB, VOCAB))

    def forward(self, inputs, targets, return_logits=False):
        rows = inputs.reshape(-1, 1).expand(-1, VOCAB)
        logits = self.table.gather(0, rows)
        return None, nn.functional.cross_entropy(logits, targets.reshape(-1))


def train_on_gpu(folder):
    model = Gathered().cuda()
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(VOCAB, (2, TOKENS), generator=generator).cuda()
    model.table.data.copy_(torch.rand(VOCAB, VOCAB, generator=generator))
    recorder = fingerprints(folder, model)
    for step in range(3):
        sgd(model, recorder, step, x, x.flip(1), rate=1.0)
    return folder


@pytest.fixture
def deterministic():
    """torch's switch, off again behind the test."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_the_op_that_adds_with_atomics_is_named(tmp_path):
    for pair in range(PAIRS):
        a, b = (train_on_gpu(tmp_path / f"{pair}{name}") for name in "ab")
        found = compare_training(a, b)
        if found.exit_code != 0:
            break
    first = found.first_divergence
    assert first is not None, f"{PAIRS} pairs of runs were equal"
    assert "scatter_add" in first.op and "backward" in first.module_path, first
    assert first.step == 0 and first.size > 0


@pytest.mark.gpu
def test_with_the_deterministic_switch_runs_are_identical(tmp_path, deterministic):
    a, b = train_on_gpu(tmp_path / "a"), train_on_gpu(tmp_path / "b")
    assert compare_training(a, b).exit_code == 0
