"""The command as its user meets it: records, verdicts as exit codes, one line for every mistake."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from drift_models import Rowwise, decoder, gpt2, llama, next_up, prompts, subject, tokens
from training import running

from xtrain import drift
from xtrain.drift import Record, compare
from xtrain.drift.bisect import Plan, _record_arguments, parse_all
from xtrain.drift.cli import build_parser, main
from xtrain.drift.recording.forwards import record_prompts
from xtrain.drift.settings import Run, check_use


def run(*arguments):
    return main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    for name, *flags in (("a",), ("b", "--batch=4", "--pad-to=24"), ("other", "--seed=1")):
        shared = ["--tokens=4", "--num-prompts=3", "--threads=1"]
        assert run("record", "--out", folder / f"{name}.drift", "tiny", *shared, *flags) == 0
    return folder


def test_record_and_compare(records, capsys, tmp_path):
    assert run("compare", records / "a.drift", records / "a.drift") == 0
    text = capsys.readouterr().out
    assert "environment: the same" in text and text.endswith(
        "verdict 0: identical: all recorded bits are equal\n"
    )
    code = run(
        *("compare", records / "a.drift", records / "b.drift"),
        *("--json", tmp_path / "x.json", "--html", tmp_path / "x.html"),
    )
    assert code in (0, 1)
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["exit_code"] == code and found["num_positions"] == 12
    names = [change["name"] for change in found["environment_changes"]]
    assert names == ["run.batch_size", "run.pad_to"]
    assert "run.batch_size" in capsys.readouterr().out


def test_json_on_stdout_is_json_alone(records, capsys):
    assert run("compare", records / "a.drift", records / "other.drift", "--json", "-") == 4
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"].startswith("not comparable: other")


def test_the_page_is_self_contained(records, tmp_path):
    out = tmp_path / "x.html"
    assert run("compare", records / "a.drift", records / "other.drift", "--html", out) == 4
    text = out.read_text()
    assert not re.search(r"src=|href=\"(?!#)|url\((?!#)|@import|<script", text)
    assert "not comparable" in text and text.count("<h2>") >= 1


def test_weights_and_prompts_of_a_preset_do_not_depend_on_the_instruction_set(tmp_path):
    """torch.randn does; and this is the pair of settings of the study: where does it start?"""
    for level in ("default", "avx2"):
        command = [sys.executable, "-m", "xtrain.drift", "record", "--out", tmp_path / level]
        done = subprocess.run(
            [*command, "tiny", "--tokens=1", "--num-prompts=2", "--threads=1"],
            env={**os.environ, "ATEN_CPU_CAPABILITY": level},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr

    found = compare(tmp_path / "default", tmp_path / "avx2")
    assert found.reason is None  # equal weights, equal prompts
    assert {c.name for c in found.changes} == {
        "torch.aten_cpu_capability",
        "env.ATEN_CPU_CAPABILITY",
    }
    first = found.first_divergence
    assert first.module_path == "blocks.0.attention" and "scaled_dot_product" in first.op
    assert found.exit_code in (1, 2, 3)


def test_one_forward_with_all_positions(tmp_path):
    (tmp_path / "p.json").write_text("[[1, 2, 3], [4, 5, 6, 7]]")
    for batch in (1, 2):
        flags = ["--tokens=0", f"--batch={batch}", "--prompts", tmp_path / "p.json"]
        assert run("record", "--out", tmp_path / f"{batch}.drift", "tiny", *flags) == 0
    assert [len(s.tokens) for s in Record(tmp_path / "2.drift").steps()] == [3, 4]
    assert run("compare", tmp_path / "1.drift", tmp_path / "2.drift") in (0, 1)


def test_a_run_of_ours_and_its_text(tmp_path, capsys, monkeypatch):
    with running(tmp_path) as runner:
        assert runner("--name=counts", "--steps=20") == 0
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.txt").write_text("one two\nthree\n")
    flags = ["--prompts", "p.txt", "--tokens=5", "--decode=generate"]
    assert run("record", "--out", "a.drift", "counts", *flags) == 0
    record = Record("a.drift")
    assert record.model["kind"] == "run" and record.model["step"] == 20
    assert [case.prompt["text"] for case in record.cases] == ["one two", "three"]
    assert all(isinstance(case.text, str) and case.text for case in record.cases)
    capsys.readouterr()
    assert run("compare", "a.drift", "a.drift") == 0
    text = capsys.readouterr().out
    assert "after 'one two" in text or "after 'three" in text


def test_a_hugging_face_folder(tmp_path):
    """Row C54: weights of the file, not of an initialisation; a changed one is found by name."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "hf")
    for name in ("a", "b"):
        out = tmp_path / f"{name}.drift"
        flags = ["--tokens=3", "--num-prompts=2", "--prompt-length=5", "--decode=generate"]
        assert run("record", "--out", out, tmp_path / "hf", *flags) == 0
        with torch.no_grad():
            model.transformer.h[1].mlp.c_fc.weight[3, 4] += 0.5
        model.save_pretrained(tmp_path / "hf")

    found = compare(tmp_path / "a.drift", tmp_path / "b.drift")
    assert found.exit_code == 4
    assert tuple(found.first_divergence) == ("transformer.h.1.mlp.c_fc", "aten.addmm")


def test_a_hugging_face_folder_with_a_tokenizer(tmp_path):
    """Of fewer ids than the head has rows: what it does not know is none of the text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    llama().save_pretrained(tmp_path / "hf")
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "hf" / "tokenizer.json"))
    (tmp_path / "p.txt").write_text("a b\nb c a\n")
    flags = ["--prompts", tmp_path / "p.txt", "--tokens=2", "--warm-up=0"]
    assert run("record", "--out", tmp_path / "x", tmp_path / "hf", *flags) == 0
    cases = Record(tmp_path / "x").cases
    assert [case.prompt["tokens"] for case in cases] == [[1, 2], [2, 0, 1]]
    chosen = [[step.tokens[0] for step in case.steps] for case in cases]
    assert max(map(max, chosen)) > 2
    assert [case.text for case in cases] == [backend.decode(ids) for ids in chosen]


# Also flags that would do nothing. Drawn prompts: 8 of 16 ids with 16 tokens chosen, so that the
# longest forward has 16 + 15. What starts with a flag is of `record --out x tiny`.
MISTAKES = """
compare nowhere.drift nowhere.drift -> there is no record nowhere.drift
compare . -> the following arguments are required: B
compare nowhere x --jsn=y -> unknown argument '--jsn=y'
compare . . -> manifest.json is missing
recrd -> invalid choice: 'recrd'
 -> arguments are required: COMMAND
record tiny -> required: --out
record --out x tinny -> 'tinny' is no preset
--tokens=-1 -> --tokens must be at least 0, got -1
--tokens=lots -> invalid int value: 'lots'
--mode=fast -> --mode must be one of eager, aot_eager
--dtype=fp8 -> --dtype must be one of auto, fp32
--decode=beam -> decode must be one of greedy, generate
--device=cuda:99 -> --device is cuda:99, but torch
--prompts=none.txt -> cannot read the prompts none.txt
--prompts=text.txt -> no tokenizer is known
--prompts=bad.json -> must hold a list of lists of ids
--prompts=big.json -> prompt 0 must be ids below 16
--prompts=empty.json -> empty.json holds no prompt
--tokens=2000 -> exceeds the model's context of 1024
--decode=sample --temperature=0 -> temperature must be
record --out x broken_hf -> cannot load broken_hf as a causal language model
record --out taken tiny -> taken exists; choose another name
record --out text.txt/x tiny -> cannot write text.txt/x
--pad-to=1 -> --pad-to 1 cannot hold prompt 0: it has 16 tokens, the longest forward 31
--pad-to=30 -> the longest forward 31; give at least that, or auto
--pad-to=0 -> --pad-to 0 cannot hold prompt 0
--pad-to=15 --tokens=0 -> it has 16 tokens, the longest forward 16
--pad-to=15 --tokens=1 -> it has 16 tokens, the longest forward 16
--pad-to=auto --decode=generate -> --pad-to auto does nothing with --decode generate
--pad-to=64 --decode=generate -> --pad-to 64 does nothing with --decode generate
--temperature=2 -> --temperature 2.0 does nothing with --decode greedy; leave it out, or
--sample-seed=0 -> --sample-seed 0 does nothing with --decode greedy
--sample-seed=1 --decode=generate -> or use --decode sample
--op-steps=1 --mode=inductor -> --op-steps 1 does nothing with --mode inductor
--tensors --op-steps=0 -> --tensors does nothing with --op-steps 0; leave it out
--tensors --mode=inductor -> --tensors does nothing with --mode inductor
--decode=greedy --tokens=0 -> --decode greedy does nothing with --tokens 0
--op-steps=0 --tokens=0 -> --op-steps 0 does nothing with --tokens 0
--num-prompts=3 --prompts=p.json -> --num-prompts 3 is for prompts that are drawn
--prompt-length=3 --prompts=p.json -> these are --prompts p.json
--runs=elsewhere -> tiny is a preset, whose name wins; elsewhere/tiny means the run
record --out x small --num-prompts=3 -> these are the built-in texts; leave it out
--threads=100000 -> --threads must be at most 1024, got 100000
--prompts=none0.json -> none0.json must hold a list of lists of ids
--prompts=none1.json -> none1.json must hold a list of lists of ids
--prompts=none2.json -> none2.json must hold a list of lists of ids
--prompts=none3.json -> none3.json must hold a list of lists of ids
--prompts=none4.json -> none4.json must hold a list of lists of ids
compare a.drift a.drift --html - -> --html needs the name of a file; --json alone
bisect tiny -> at least one --factor
bisect tiny --factor=threads=1 -> a factor is NAME=VALUE,VALUE
bisect tiny --factor=threads=1,1 -> of different values, got 'threads=1,1'
bisect tiny --factor=treads=1,2 -> unknown factor 'treads'
bisect tiny --factor=compile=yes,no -> compile is off or on
bisect tiny --factor=mode=eager,inductr -> --mode must be one of eager, aot_eager
bisect tiny --factor=threads=1,x -> --threads must be a whole number, got 'x'
bisect tiny --factor=threads=1,0 -> --threads must be at least 1, got 0
bisect tiny --factor=batch=1,-8 -> --batch must be at least 1, got -8
bisect tiny --factor=dtype=fp32,fp8 -> --dtype must be one of auto, fp32, bf16
bisect tiny --factor=decode=greedy,beam -> --decode must be one of greedy, gen
bisect tiny --factor=device=cpu,gpu -> --device must be cpu, cuda or cuda:N
bisect tiny --factor=pad-to=auto,-4 -> --pad-to must be at least 0, got -4
bisect tiny --factor=threads=1,2 --tokens=-1 -> --tokens must be at least 0
bisect tiny --factor=python=/nowhere,/else -> neither an interpreter nor a virtual
bisect tiny --factor=A=1,2 --factor=A=3,4 -> the factor A is given twice
bisect tiny --packages --factor=A=1,2 -> --packages compares two Pythons
bisect tiny --max-runs=3 --factor=A=1,2,3 --factor=B=1,2 -> need 6 runs
ops -> ops compares two settings
ops --factor=A=1,2,3 -> ops compares two settings
ops --factor=batch=1,8 -> ops runs no model, batch says nothing to it
ops --rows=0 --factor=A=1,2 -> --rows must be at least 1, got 0
bisect tiny --factor=threads=1,100000 -> --threads must be at most 1024
bisect tiny --temperature=2 --factor=threads=1,2 -> --temperature 2.0 does nothing
bisect tiny --threads=4 --factor=threads=1,2 -> --threads 4 is none of the values of the fact
bisect tiny --pad-to=9 --factor=pad-to=auto,32 -> --pad-to 9 is none of the values
bisect tiny --mode=eager --factor=compile=off,on -> --mode eager is decided by the factor comp
ops --dtype=fp16 --factor=dtype=fp32,bf16 -> --dtype fp16 is none of the values of the factor dtype
""".strip().splitlines()
# --prompts none0.json, ...
NO_LISTS = ['{"a": 1}', "3", '"text"', "[1, 2]", '["text"]']


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    files = {"text.txt": "words\n", "bad.json": '{"a": 1', "big.json": "[[99]]", "empty.json": "[]"}
    files |= {"p.json": "[[1, 2]]", "broken_hf/config.json": '{"model_type": "gpt2"}'}
    files |= {f"none{number}.json": text for number, text in enumerate(NO_LISTS)}
    for name in ("taken", "broken_hf"):
        (folder / name).mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("row", MISTAKES)
def test_mistakes_are_one_line_and_exit_code_5(mistaken, monkeypatch, capsys, row):
    line, _, message = row.partition(" -> ")
    line = f"record --out x tiny {line}" if line.startswith("--") else line
    monkeypatch.chdir(mistaken)
    before = sorted(mistaken.iterdir())
    try:
        code = main(line.split())
    except SystemExit as error:
        code = error.code
    out, err = capsys.readouterr()
    assert code == 5 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err
    assert sorted(mistaken.iterdir()) == before


def test_an_internal_error_is_no_verdict(records, monkeypatch, capsys, tmp_path):
    from xtrain.drift.comparison import two_records as comparison

    def fail(*_):
        raise KeyError("a bug")

    monkeypatch.setattr(comparison, "changes", fail)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run("compare", records / "a.drift", records / "b.drift") == 70
    error = capsys.readouterr().err
    assert "internal error: KeyError" in error and error.count("\n") == 1
    (trace,) = tmp_path.glob("xtrain-error-*")
    assert str(trace) in error and "Traceback" in trace.read_text()


def test_help_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; from xtrain.drift.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True
    )
    assert "exit codes of compare: 0 identical" in done.stdout


def test_bench_compares_eager_with_what_is_compiled(capsys):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/ is no installed package
    from bench import compare as bench_compare

    threads = torch.get_num_threads()
    flags = ["--drift", "--preset=tiny", "--seq=12", "--device=cpu", f"--threads={threads}"]
    assert bench_compare.main(flags) == 0
    text = capsys.readouterr().out
    for name in ("torch.compile", "xtrain.compile"):
        part = text.partition(f"=== eager (A) and {name} (B) ===")[2]
        verdict = re.search(r"^verdict (\d)", part, re.MULTILINE)
        assert verdict is not None and int(verdict[1]) in (0, 1, 2)
        assert "12 places" in part


def test_what_fits_exactly_is_no_mistake(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shared = ["record", "--out", "x", "tiny", "--num-prompts=2", "--overwrite", "--threads=1"]
    for flags in (["--pad-to=18", "--tokens=3"], ["--pad-to=16", "--tokens=0"], ["--seed=3"]):
        assert main([*shared, *flags]) == 0
    assert Record("x").model["seed"] == 3 and Record("x").run["warm_up"] == 1


# --- bisect: a flag counts when one of the runs can use it ----------------------------------------


def plan_of(*arguments):
    args = build_parser().parse_args(["bisect", "tiny", *arguments])
    return args, Plan(parse_all(args.factor))


def test_bisect_hands_a_flag_to_the_runs_that_can_use_it():
    args, plan = plan_of(
        *("--temperature=2", "--tensors", "--threads=1", "--seed=0"),
        *("--factor=decode=greedy,sample", "--factor=compile=off,on", "--factor=threads=1,2"),
    )
    check_use(args, plan.values)
    baseline, other = plan.named(()), {"decode": "sample", "compile": "on", "threads": "1"}
    found = _record_arguments(args, baseline)[2:]
    assert found == ["--seed=0", "--tensors", "--pad-to=auto"]
    found = _record_arguments(args, other)[2:]
    assert found == ["--seed=0", "--temperature=2.0", "--pad-to=auto"]


def test_generate_is_not_padded_beside_compiled_runs():
    args, _ = plan_of("--factor=decode=greedy,generate", "--factor=mode=eager,aot_eager")
    named = {"decode": "generate", "mode": "eager"}
    assert _record_arguments(args, named) == ["record", "tiny"]


# --- packages that are missing, readers that leave -----------------------------------------------


# Refuses every package but those that docs/drift.md asks for.
ALONE = """
import importlib.abc, runpy, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in {known} or top in sys.stdlib_module_names:
            return None
        raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuse())
sys.argv[0] = "drift"
runpy.run_module("xtrain.drift", run_name="__main__", alter_sys=True)
"""
READER = ("xtrain", "numpy", "xxhash", "tabulate")


def alone(*arguments, known=READER):
    command = [sys.executable, "-c", ALONE.format(known=known), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_comparing_needs_numpy_xxhash_and_tabulate_alone(records, tmp_path):
    done = alone("compare", records / "a.drift", records / "a.drift")
    assert done.returncode == 0 and done.stderr == "" and "verdict 0" in done.stdout
    done = alone("compare", records / "a.drift", records / "a.drift", "--html", tmp_path / "x.html")
    assert done.returncode == 5 and not (tmp_path / "x.html").exists()
    assert done.stderr == "error: this needs the package matplotlib; install it\n"
    done = alone("compare", records / "a.drift", records / "other.drift", "--json", "-")
    assert done.returncode == 4 and json.loads(done.stdout)["exit_code"] == 4
    assert alone("compare", records / "a.drift", "nowhere").returncode == 5
    assert "exit codes of compare" in alone("--help").stdout


def test_a_package_that_is_missing_is_one_line_and_no_verdict(tmp_path, records):
    for command, package in (
        (["record", "--out", tmp_path / "x", "tiny"], "torch"),
        (["ops", "--factor=A=1,2", "--child"], "torch"),
    ):
        done = alone(*command)
        assert done.returncode == 5 and done.stdout == ""
        assert done.stderr == f"error: this needs the package {package}; install it\n"
    for package in READER[1:]:
        known = tuple(name for name in READER if name != package)
        done = alone("compare", records / "a.drift", records / "other.drift", known=known)
        assert done.returncode == 5
        assert done.stderr == f"error: this needs the package {package}; install it\n"


# --- stdout --------------------------------------------------------------------------------------


def command_into(target, *arguments):
    command = [sys.executable, "-m", "xtrain.drift", *map(str, arguments)]
    return subprocess.run(command, stdout=target, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("flags", [[], ["--json=-"]], ids=str)
def test_a_reader_that_leaves_changes_no_verdict(records, flags):
    """As in `compare A B | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        done = command_into(pipe, "compare", records / "a.drift", records / "other.drift", *flags)
    assert (done.returncode, done.stderr) == (4, "")


def test_a_stdout_that_takes_nothing_is_one_line(records):
    with Path("/dev/full").open("w") as device:
        done = command_into(device, "compare", records / "a.drift", records / "a.drift")
    assert done.returncode == 5
    assert done.stderr == "error: cannot write to stdout: No space left on device\n"


# --- what a program may hand to xtrain.drift, by mistake or as a baseline for its tests -----------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        # -1 would count down for ever
        ({"warm_up": -1}, "warm_up must be at least 0, got -1"),
        ({"warm_up": 1.5}, "warm_up must be a whole number, got 1.5"),
        ({"warm_up": "2"}, "warm_up must be a whole number, got '2'"),
        ({"warm_up": True}, "warm_up must be a whole number, got True"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
    ],
)
def test_what_no_setting_can_be(tmp_path, settings, message):
    with pytest.raises(drift.DriftError, match=message):
        drift.record(decoder(), tokens(), out=tmp_path / "x", **settings)
    assert not list(tmp_path.iterdir())


def test_what_no_decoding_can_be_and_what_is_no_module():
    for name in ("op_steps", "sample_seed", "pad_to"):
        with pytest.raises(drift.DriftError, match=f"{name} must be at least 0, got -1"):
            record_prompts(subject(decoder()), prompts([1]), Run(**{name: -1}))
    with pytest.raises(drift.DriftError, match="model must be a torch.nn.Module, got function"):
        drift.record(lambda ids: ids, tokens())


@pytest.mark.parametrize("mode", ["eager", "aot_eager", "inductor"])
def test_a_compiled_model_is_not_watched_from_inside(mode):
    """Dynamo would trace the watching itself, or compile what is compiled."""
    import xtrain

    for compiled in (
        torch.compile(decoder(), backend="eager"),
        xtrain.compile(decoder(), dropout=0.5, seed=0, backend="eager"),
    ):
        with pytest.raises(drift.DriftError, match=f"mode={mode} is for the plain model"):
            drift.record(compiled, tokens(), mode=mode)


def test_a_compiled_model_against_the_baseline_of_the_plain_one(tmp_path):
    """It runs as it is: the logits count."""
    drift.record(decoder(), tokens(), out=tmp_path / "base", tensors=True)
    calls = []

    def backend(graph, inputs):
        calls.append(len(inputs))

        def run(*arguments):
            calls.append("run")
            return graph(*arguments)

        return run

    found = drift.assert_no_drift(torch.compile(decoder(), backend=backend), tmp_path / "base")
    assert "run" in calls and found.b.run["mode"] == "unobserved" and found.num_matched == 0
    changed = decoder()
    with torch.no_grad():
        changed.blocks[1].attention.output.weight.mul_(2)
    with pytest.raises(AssertionError, match="other weights: blocks.1.attention.output.weight"):
        drift.assert_no_drift(torch.compile(changed, backend="eager"), tmp_path / "base")


@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path, capsys, make):
    """transformers draws them at random, in each process others; a tied head is no such weight."""
    from safetensors.torch import load_file, save_file

    folder, flags = tmp_path / "model", ["--tokens=1", "--num-prompts=1", "--threads=1"]
    make().save_pretrained(folder)
    assert main(["record", "--out", str(tmp_path / "a"), str(folder), *flags]) == 0
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "mlp" in name)
    del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    capsys.readouterr()
    assert main(["record", "--out", str(tmp_path / "b"), str(folder), *flags]) == 5
    assert f"its files lack 1 weight of the model: {name}" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


# --- assert_no_drift -----------------------------------------------------------------------------


def test_a_model_that_stays_passes_and_one_that_moves_fails(tmp_path):
    drift.record(decoder(), tokens(batch=2), out=tmp_path / "base.drift")
    found = drift.assert_no_drift(decoder(), tmp_path / "base.drift")
    assert found.exit_code == 0 and len(found.positions) == 18
    model = decoder()
    next_up(model.blocks[1].feed_forward.up.weight)
    with pytest.raises(
        AssertionError, match="first difference: aten.mm in blocks.1.feed_forward.up"
    ):
        drift.assert_no_drift(model, tmp_path / "base.drift", accept=2)


class Noisy(Rowwise):
    """The same weights, computed with an error: another environment."""

    def __init__(self, noise):
        super().__init__()
        self.noise = noise

    def forward(self, input_ids):
        logits = super().forward(input_ids)
        return logits * (1 + self.noise) if self.noise else logits


def test_what_is_accepted(tmp_path):
    drift.record(Noisy(0.0), tokens(), out=tmp_path / "base.drift")
    drift.assert_no_drift(Noisy(1e-6), tmp_path / "base.drift", accept=1)
    with pytest.raises(AssertionError, match="verdict 1: the numbers differ, no token can flip"):
        drift.assert_no_drift(Noisy(1e-6), tmp_path / "base.drift")
    with pytest.raises(AssertionError, match="verdict 3: the tokens differ"):
        drift.assert_no_drift(Noisy(-2.0), tmp_path / "base.drift", accept=2)
    with pytest.raises(ValueError, match="accept must be 0, 1 or 2, got 3"):
        drift.assert_no_drift(Noisy(0.0), tmp_path / "base.drift", accept=3)
    with pytest.raises(drift.DriftError, match="there is no record"):
        drift.assert_no_drift(Noisy(0.0), tmp_path / "other.drift")


def test_a_baseline_of_decoded_prompts(tmp_path):
    model = Rowwise()
    settings = Run(num_tokens=3, batch_size=2)
    lists = prompts([1, 2, 3], [4])
    record_prompts(subject(model), lists, settings, out=tmp_path / "base.drift")
    assert drift.assert_no_drift(Rowwise(), tmp_path / "base.drift").exit_code == 0
    other = Rowwise()
    with torch.no_grad():
        other.head.mul_(-1)
    with pytest.raises(AssertionError, match="not comparable: other weights: head"):
        drift.assert_no_drift(other, tmp_path / "base.drift")


def test_the_page_s_example_as_it_stands(tmp_path, monkeypatch):
    """What a reader pastes: the comparison at its end is that of the model with itself."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "drift.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    monkeypatch.chdir(tmp_path)
    model, x = decoder(), tokens(2)
    drift.record(model, x, out="tests/baseline.drift")
    names = {"torch": torch, "model": model, "tokens": x, "vector": torch.ones(48)}
    exec(code, names)
    assert names["comparison"].exit_code == 0 and len(names["comparison"].positions) == x.numel()
    assert names["linear"].cases[0].steps[0].logits()[0].shape == (1, 440)
