"""A flag that would do nothing is refused, with its value and what to do."""

from __future__ import annotations

import pytest

from xtrain.drift import DriftError, Record
from xtrain.drift.bisection.command import _record_arguments
from xtrain.drift.bisection.factors import parse_all
from xtrain.drift.bisection.plan import Plan
from xtrain.drift.command import build_parser, main
from xtrain.drift.settings import check_use

RECORD = ["record", "--out", "x", "tiny"]
WITHOUT_EFFECT = [
    # 8 prompts of 16 ids with 16 tokens chosen: the longest forward has 16 + 15
    (["--pad-to=1"], "--pad-to 1 cannot hold prompt 0: it has 16 tokens, the longest forward 31"),
    (["--pad-to=30"], "the longest forward 31; give at least that, or auto"),
    (["--pad-to=0"], "--pad-to 0 cannot hold prompt 0"),
    (["--pad-to=15", "--tokens=0"], "it has 16 tokens, the longest forward 16"),
    (["--pad-to=15", "--tokens=1"], "it has 16 tokens, the longest forward 16"),
    (["--pad-to=auto", "--decode=generate"], "--pad-to auto does nothing with --decode generate"),
    (["--pad-to=64", "--decode=generate"], "--pad-to 64 does nothing with --decode generate"),
    (["--temperature=2"], "--temperature 2.0 does nothing with --decode greedy; leave it out, or"),
    (["--sample-seed=0"], "--sample-seed 0 does nothing with --decode greedy"),
    (["--sample-seed=1", "--decode=generate"], "or use --decode sample"),
    (["--op-steps=1", "--mode=inductor"], "--op-steps 1 does nothing with --mode inductor"),
    (["--tensors", "--op-steps=0"], "--tensors does nothing with --op-steps 0; leave it out"),
    (["--tensors", "--mode=inductor"], "--tensors does nothing with --mode inductor"),
    (["--decode=greedy", "--tokens=0"], "--decode greedy does nothing with --tokens 0"),
    (["--op-steps=0", "--tokens=0"], "--op-steps 0 does nothing with --tokens 0"),
    (["--num-prompts=3", "--prompts=p.json"], "--num-prompts 3 is for prompts that are drawn"),
    (["--prompt-length=3", "--prompts=p.json"], "these are --prompts p.json"),
    (["--runs=elsewhere"], "tiny is a preset, whose name wins; elsewhere/tiny means the run"),
]


@pytest.mark.parametrize(("flags", "message"), WITHOUT_EFFECT, ids=lambda value: str(value)[:40])
def test_a_flag_without_effect_is_one_line(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.json").write_text("[[1, 2]]")
    assert main([*RECORD, *flags]) == 5
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err
    assert not (tmp_path / "x").exists()


def test_prompts_of_a_tokenizer_are_not_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["record", "--out", "x", "small", "--num-prompts=3"]) == 5
    assert "these are the built-in texts; leave it out" in capsys.readouterr().err


def test_what_fits_exactly_is_no_mistake(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shared = [*RECORD, "--num-prompts=2", "--overwrite", "--threads=1"]
    for flags in (["--pad-to=18", "--tokens=3"], ["--pad-to=16", "--tokens=0"], ["--seed=3"]):
        assert main([*shared, *flags]) == 0
    assert Record("x").model["seed"] == 3 and Record("x").run["warm_up"] == 1


# --- bisect: a flag counts when one of the runs can use it ----------------------------------------


def plan_of(*arguments):
    args = build_parser().parse_args(["bisect", "tiny", *arguments])
    return args, Plan(parse_all(args.factor))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature=2", "--factor=threads=1,2"], "--temperature 2.0 does nothing"),
        (["--threads=4", "--factor=threads=1,2"], "--threads 4 is none of the values of the fact"),
        (["--pad-to=9", "--factor=pad-to=auto,32"], "--pad-to 9 is none of the values"),
        (["--mode=eager", "--factor=compile=off,on"], "--mode eager is decided by the factor comp"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bisect_refuses_what_no_run_can_use(arguments, message):
    args, plan = plan_of(*arguments)
    with pytest.raises(DriftError, match=message):
        check_use(args, plan.factors)


def test_bisect_hands_a_flag_to_the_runs_that_can_use_it():
    args, plan = plan_of(
        *("--temperature=2", "--tensors", "--threads=1", "--seed=0"),
        *("--factor=decode=greedy,sample", "--factor=compile=off,on", "--factor=threads=1,2"),
    )
    check_use(args, plan.factors)
    found = {
        setting: _record_arguments(args, plan.named(setting))[2:]
        for setting in (plan.baseline, ("sample", "on", "1"))
    }
    assert found[plan.baseline] == ["--seed=0", "--tensors", "--pad-to=auto"]
    assert found["sample", "on", "1"] == ["--seed=0", "--temperature=2.0", "--pad-to=auto"]


def test_generate_is_not_padded_beside_compiled_runs():
    args, plan = plan_of("--factor=decode=greedy,generate", "--factor=mode=eager,aot_eager")
    assert _record_arguments(args, plan.named(("generate", "eager"))) == ["record", "tiny"]


def test_ops_refuses_a_flag_that_its_factor_overrides(capsys):
    assert main(["ops", "--dtype=fp16", "--factor=dtype=fp32,bf16"]) == 5
    assert "--dtype fp16 is none of the values of the factor dtype" in capsys.readouterr().err
