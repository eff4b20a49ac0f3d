"""How every command ends: bad input in one line and exit 2, a fault of xtrain's in one and 70."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from training import running

from xtrain import generate, train
from xtrain.command_line import exit_codes
from xtrain.drift.cli import main as drift_main
from xtrain.explain.__main__ import main as explain_main
from xtrain.training import console, loop

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # bench/ is no installed package


def fail(*_, **__):
    raise KeyError("a bug\nof two lines \x1b[31m")


def bench(name):
    import importlib

    return importlib.import_module(f"bench.{name}")


# --- faults of the program ----------------------------------------------------------------------

COMMANDS = {
    "train": (lambda: train.main, "xtrain.training.loop.train", ["--preset=tiny"]),
    "generate": (lambda: generate.main, "xtrain.generate.load_run", ["--run=r"]),
    "explain": (lambda: explain_main, "xtrain.subject.load", ["tiny"]),
    "drift": (
        lambda: drift_main,
        "xtrain.drift.comparison.two_records.compare",
        ["compare", "a", "b"],
    ),
    "compare": (lambda: bench("compare").main, "bench.compare.resolve", []),
    "compare_hf": (lambda: bench("compare_hf").main, "bench.compare_hf.resolve", []),
    "report_ops": (lambda: bench("report_ops").main, "bench.report_ops.run", []),
    "run_op": (lambda: bench("run_op").main, "bench.run_op.run", ["dropout"]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_fault_is_one_line_that_says_where_its_trace_is(name, tmp_path, monkeypatch, capsys):
    command, place, arguments = COMMANDS[name]
    main = command()
    (tmp_path / "runs" / "r").mkdir(parents=True)
    (tmp_path / "runs" / "r" / "config.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(place, fail)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with running(tmp_path):
        assert main(arguments) == 70
    error = capsys.readouterr().err
    assert error.startswith(r"internal error: KeyError: 'a bug\nof two lines \x1b[31m'")
    assert error.count("\n") == 1 and "please report it" in error
    (trace,) = tmp_path.glob("xtrain-error-*.txt")
    assert error.endswith(f" written to {trace}\n")
    text = trace.read_text()
    assert "Traceback" in text and "in fail" in text and f"torch {torch.__version__}" in text


class Panic(BaseException):
    """As a package in Rust ends: no Exception."""


@pytest.mark.parametrize(
    "error, code, line",
    [
        (Panic("no"), 70, "internal error: Panic: no"),
        (RecursionError("deep"), 70, "internal error: RecursionError: deep"),
        (AssertionError(), 70, "internal error: AssertionError; this is a fault"),
        (MemoryError("Unable to allocate 9 TiB"), 1, "error: out of memory: Unable to allocate 9"),
        (
            PermissionError(13, "Permission denied", "x/y"),
            2,
            "error: cannot read or write x/y: Per",
        ),
        (OSError(errno.ENOSPC, "No space left", "x"), 1, "error: cannot read or write x: No space"),
        (OSError("of no file"), 70, "internal error: OSError: of no file"),
        (KeyboardInterrupt(), 130, "\ninterrupted"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 141, ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_codes_and_lines(error, code, line, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with exit_codes() as status:
        raise error
    assert status.code == code
    said = capsys.readouterr().err
    assert said.startswith(line) and said.strip("\n").count("\n") == 0
    assert len(list(tmp_path.iterdir())) == (code == 70)


def test_memory_that_torch_does_not_get_is_no_fault(capsys):
    with exit_codes() as status:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert status.code == 1
    assert "you tried to allocate 1152921504606846976 bytes" in capsys.readouterr().err


def test_a_trace_that_no_folder_takes_is_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with exit_codes() as status:
        fail()
    *trace, line = capsys.readouterr().err.splitlines()
    assert status.code == 70 and "Traceback (most recent call last):" in trace
    assert line.startswith("internal error: KeyError") and "which is above" in line


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--vocab", "99999999999"], "bytes ("),
        (["--batch", "99999999999"], "bytes ("),
        (["--seed", str(2**64)], "argument --seed: invalid seed, from -2^63 to 2^64 - 1 value"),
        (["--threads", "0"], "argument --threads: invalid positive int"),
        (["--json", "/"], "argument --json: / is a folder"),
        (["--markdown", "/dev/null/x"], "argument --markdown: /dev/null/x cannot be written into"),
        (["--device", "cuda:x"], "--device"),
    ],
)
def test_a_benchmark_refuses_what_it_could_not_do_before_it_begins(capsys, arguments, message):
    try:
        code = bench("compare").main(["--preset=tiny", "--device=cpu", *arguments])
    except SystemExit as stop:
        code = stop.code
    out, error = capsys.readouterr()
    assert code == 2 and out == "" and message in error
    assert error.startswith("error: ") and error.count("\n") == 1


def test_an_exit_asked_for_goes_through():
    with pytest.raises(SystemExit) as stop, exit_codes():
        raise SystemExit(5)
    assert stop.value.code == 5


@pytest.mark.parametrize("closed", ["reader", "full", "shut"])
def test_a_stdout_that_takes_nothing(closed):
    """A reader that has left, a full disk, no stdout at all: never a traceback."""
    script = "from xtrain.command_line import *\nwith exit_codes() as s: show('text\\n' * 9)\n"
    script += "sys.exit(s.code)"
    arguments = [sys.executable, "-c", script]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    keywords = dict(stderr=subprocess.PIPE, text=True, env=environment)
    if closed == "reader":
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run(arguments, stdout=write, **keywords)
        os.close(write)
        assert (done.returncode, done.stderr) == (0, "")
    elif closed == "full":
        with open("/dev/full", "w") as full:
            done = subprocess.run(arguments, stdout=full, **keywords)
        assert (done.returncode, done.stderr) == (
            1,
            "error: cannot write to stdout: No space left on device\n",
        )
    else:
        line = f'exec {" ".join(map(repr, arguments[:2]))} "$0" >&-'
        done = subprocess.run(["sh", "-c", line, script], **keywords)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_run_goes_on_without_its_log(tmp_path, monkeypatch, capsys):
    with running(tmp_path), open("/dev/full", "w", buffering=1) as full:
        console.set_up_logging()
        monkeypatch.setattr(sys, "stdout", full)
        for number in range(3):
            logging.getLogger("xtrain.training").info("step %d", number)
        monkeypatch.undo()
    said = capsys.readouterr().err
    assert said == "warning: no more is shown on stdout: No space left on device\n"


# --- what somebody else has written --------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    with running(folder) as runner:
        assert runner("--name=r", "--steps=4", "--set=checkpoint.interval=2") == 0
    return folder


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    """A run of two checkpoints, of steps 2 and 4, in the working folder."""
    shutil.copytree(trained / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    with running(tmp_path):
        yield tmp_path / "runs" / "r"


def said(capsys, message, start="error: "):
    """All that a command has said is one line on stderr, which holds a message."""
    out, error = capsys.readouterr()
    assert out == "" and error.startswith(start) and error.count("\n") == 1, error
    assert message in error and len(error) < 2100, error
    return error


def checkpoints(run):
    return sorted((run / "checkpoints").iterdir())


def forge(checkpoint, name, data):
    """Put data, or a folder, in a file's place, and in the manifest what it says of them."""
    path, manifest = checkpoint / name, checkpoint / "manifest.json"
    path.unlink()
    if data is None:
        path.mkdir()
        return
    path.write_bytes(data)
    if path != manifest:
        table = json.loads(manifest.read_text())
        table["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        manifest.write_text(json.dumps(table))


def forge_state(checkpoint, **changes):
    state = json.loads((checkpoint / "state.json").read_text())
    forge(checkpoint, "state.json", json.dumps({**state, **changes}).encode())


def forge_tensors(checkpoint, change, stem="model"):
    tensors = load_file(checkpoint / f"{stem}.safetensors")
    for name, tensor in tensors.items():
        change(name, tensor)
    path = checkpoint.parent.parent / "forged"
    save_file(tensors, path)
    forge(checkpoint, f"{stem}.safetensors", path.read_bytes())
    path.unlink()


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def generated(*flags):
    return generate.main(["--run=r", "--device=cpu", "--tokens=3", *flags])


def resumed(*flags):
    return train.main(["--resume=r", "--steps=6", "--device=cpu", *flags])


DAMAGE = {
    "state.json": {
        b"": "state.json is damaged",
        b"{}": "state.json is damaged (format is missing)",
        b"[]": "state.json is damaged (the whole is [])",
        b"\xff\xfe": "state.json is damaged ('utf-8' codec",
        b'{"format":1,"step":-5}': "state.json is damaged (step is -5)",
        b'{"format":1,"step":true}': "state.json is damaged (step is True)",
        b'{"format":1,"step":7}': "state.json is damaged (step is 7, not 4)",
        b'{"format":1,"step":4,"step":4}': "the key 'step' is there twice",
        b'{"format":1,"step":NaN}': "NaN is no JSON number",
        b'{"a":' * 100_000: "state.json is damaged (it is nested too deeply)",
        b'{"a":' * 90 + b"1" + b"}" * 90: "state.json is damaged (it is nested more than 64 deep)",
    },
    "manifest.json": {
        **dict.fromkeys((b"", b"{}", b"[]", b"[" * 100_000, b"\0"), "manifest.json is unreadable"),
        b'{"format":1,"files":{"state.json":3}}': "manifest.json is unreadable",
        b'{"format":99,"files":{}}': "written by a newer xtrain (format 99)",
        None: "manifest.json cannot be read: it is a folder",
    },
    "model.safetensors": {
        b"": "model.safetensors is damaged",
        (1 << 60).to_bytes(8, "little") + b"{}": "model.safetensors is damaged",
        (2).to_bytes(8, "little") + b"{]": "model.safetensors is damaged",
        bytes(range(256)) * 9: "model.safetensors is damaged",
    },
}


@pytest.mark.parametrize(
    "name, data, message",
    [(name, data, text) for name, cases in DAMAGE.items() for data, text in cases.items()],
    ids=lambda value: repr(value)[:24],
)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(run, capsys, name, data, message):
    """Even one whose manifest was made to fit; where there is no older one, nothing is touched."""
    older, newer = checkpoints(run)
    forge(newer, name, data)
    assert generated() == 0
    out, error = capsys.readouterr()
    assert error.startswith(f"warning: passed over the checkpoint {newer.relative_to(Path.cwd())}")
    assert message in error and error.endswith("; using step_00000002\n")
    assert error.count("\n") == 1 and len(out) >= 3

    shutil.rmtree(older)
    before = contents(run)
    for command in (generated, resumed):
        assert command() == 2
        said(capsys, message, "error: runs/r has no complete checkpoint to ")
    assert contents(run) == before


def test_weights_that_are_no_models(run, capsys):
    newer = checkpoints(run)[1]
    kept = (newer / "state.json").read_bytes()
    model = json.loads(kept)["model"]
    cases = [
        (dict(model={}), "is damaged: model."),
        (dict(model=[]), "is damaged: model is []"),
        (dict(model={**model, "vocab_size": 99_999_999_999}), "its weights are not the"),
        (dict(model={**model, "n_layers": 10**12}), "its weights are not the"),
        (dict(model={**model, "n_layers": "2"}), "model.n_layers must be a positive int"),
        (dict(model={**model, "rope_base": 10**400}), "model.rope_base must be a finite"),
        (dict(aliases={"a": "b"}), "has no tensor b, which a is to be"),
        (dict(aliases={"a": 3}), "is damaged: aliases is {'a': 3}"),
        (dict(data={}), "is damaged: data.fingerprint is missing"),
    ]
    for changes, message in cases:
        forge_state(newer, **changes)
        assert generated() == 2, changes
        said(capsys, message)
        forge(newer, "state.json", kept)


def test_weights_that_are_not_finite_give_no_text(run, capsys):
    newer = checkpoints(run)[1]
    for value in (float("nan"), float("inf")):
        forge_tensors(newer, lambda name, tensor, value=value: tensor.fill_(value))
        for temperature in ("0", "0.8"):
            assert generated(f"--temperature={temperature}") == 2
            said(capsys, "", "error: runs/r, step 4: the logits after 1 tokens are not fini")


def test_optimiser_and_generators_that_cannot_be_restored(run, capsys):
    newer = checkpoints(run)[1]
    before = contents(run)
    save_file({"cpu": torch.zeros(3)}, run / "rng")
    save_file({"norm.weight/exp_avg": torch.zeros(3)}, run / "optimizer")
    for stem in ("rng", "optimizer"):
        data = (newer / f"{stem}.safetensors").read_bytes()
        forge(newer, f"{stem}.safetensors", (run / stem).read_bytes())
        assert resumed() == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "its optimiser or generators cannot be restored" in error
        forge(newer, f"{stem}.safetensors", data)
        (run / stem).unlink()
    assert contents(run).keys() == before.keys()


@pytest.mark.parametrize(
    "data, message",
    [
        (b'{"step":"x"}\n', "line 1 is no record of a step (step is 'x')"),
        (b'{"step":-1}\n', "(step is -1)"),
        (b'{"step":true}\n', "(step is True)"),
        (b'{"step":0.5}\n', "(step is 0.5)"),
        (b'{"step":0}\n{"loss":1}\n', "line 2 is no record of a step (step is missing)"),
        (b'{"step":0,"loss":"low"}\n', "(loss is 'low')"),
        (b'{"step":0,"loss":NaN}\n', "(NaN is no JSON number)"),
        (b'{"step":0,"step":0}\n', "(the key 'step' is there twice)"),
        (b"\xff\xfe\n", "line 1 is no record of a step ('utf-8' codec"),
        (b"\n", "line 1 is no record"),
        (b"[" * 100_000 + b"\n", "(it is nested too deeply)"),
        (b"\0\n", "line 1 is no record"),
        (None, "cannot read runs/r/metrics.jsonl: it is a folder"),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_records_that_are_none_are_refused_before_anything_is_written(run, capsys, data, message):
    metrics = run / "metrics.jsonl"
    metrics.unlink()
    metrics.mkdir() if data is None else metrics.write_bytes(data)
    before = contents(run)
    assert resumed() == 2
    said(capsys, message)
    assert contents(run) == before


def test_a_last_record_that_a_kill_cut_short_is_dropped(run):
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "lo\xc3')
    assert resumed() == 0
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "data, message",
    [
        (b"", "is not a tokenizer.json"),
        (b"{}", "is not a tokenizer.json"),
        (b"[]", "is not a tokenizer.json (it holds no object)"),
        (bytes(range(256)), "is not a tokenizer.json ('utf-8' codec"),
        (b'{"model":' * 100_000, "is not a tokenizer.json (it is nested too deeply)"),
        (b'{"xtrain_ids":true}', "'True' is not a number of tokens"),
        (b'{"xtrain_ids":300}', "has ids up to 299, and the model of runs/r/checkpoints/step_0000"),
        (b'{"xtrain_ids":200}', "ids:200 has no text to encode"),
        (None, "no tokenizer file"),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_a_tokenizer_that_is_none_of_the_models(run, capsys, data, message):
    (run / "tokenizer.json").unlink()
    if data is None:
        (run / "tokenizer.json").mkdir()
    else:
        (run / "tokenizer.json").write_bytes(data)
    assert generated() == 2
    said(capsys, message)


@pytest.mark.parametrize(
    "text, message",
    [
        ("a = " + "[" * 10_000, "cannot read the configuration c.toml: it is nested too deeply"),
        ("a = " + "[" * 90 + "]" * 90, "it is nested more than 64 deep"),
        ("[train.steps" + ".a" * 3_000 + "]", "it is nested more than 64 deep"),
        ("[train]\nsteps = 1\nsteps = 2", "c.toml: Cannot overwrite a value"),
        ("[trian]\nsteps = 1", "unknown section 'trian' in c.toml; did you mean train?"),
        ("[train]\nstep = 1", "unknown key in [train] 'step' in c.toml; did you mean steps?"),
        ("train = 3", "train must be a section ([train]) in c.toml, got 3"),
        ("[train\nsteps = 1", "cannot read the configuration c.toml: Expected"),
        ("[train]\nsteps = 'x'", "train.steps must be a whole number, got 'x'"),
        ("[train]\nsteps = true", "train.steps must be a whole number, got True"),
        ("[train]\nsteps = nan", "train.steps must be a whole number, got nan"),
        ("[train]\nsteps = {a = 1}", "train.steps must be a whole number, got {'a': 1}"),
        ("[train]\nsteps = -3", "train.steps must be at least 1, got -3"),
        ("[train]\nsteps = 0x" + "f" * 9_000, "train.steps must be at most 2^63 - 1"),
        ("[train]\nsteps = " + "9" * 5_000, "cannot read the configuration c.toml: Exceeds"),
        ("[optim]\nlearning_rate = inf", "optim.learning_rate must be finite, got inf"),
        ("[optim]\nlearning_rate = 1" + "0" * 400, "optim.learning_rate must be finite, got inf"),
        ("[data]\npaths = 'a.txt'", "data.paths must be a list of texts, got 'a.txt'"),
        ('[data]\npaths = ["a\\u0000b"]', "data.paths must be UTF-8 text without NUL bytes"),
        ("[data]\npaths = ['" + "x" * 5_000 + "']", "File name too long"),
        ("[model]\nvocab_size = 99999999999", "bytes ("),
        ("[model]\nn_layers = 99999999999", "bytes ("),
        ("[model]\nmax_seq_len = 99999999999", "bytes ("),
        ("[train]\nbatch_size = 99999999999", "bytes ("),
        ("[[train]]\nsteps = 1", "train must be a section ([train]) in c.toml, got [{'steps': 1}]"),
        ("\0", "cannot read the configuration c.toml"),
    ],
    ids=lambda value: value[:32],
)
def test_a_wrong_configuration_file(run, capsys, text, message):
    Path("c.toml").write_text(text)
    before = contents(Path.cwd())
    assert train.main(["--preset=tiny", "--config=c.toml", "--device=cpu", "--name=new"]) == 2
    said(capsys, message)
    assert contents(Path.cwd()) == before and not Path("runs/new").exists()


def test_devices_and_folders_in_the_place_of_files(run, capsys):
    os.mkfifo("pipe")
    cases = [
        (["--config=/dev/zero"], "it is no file but a device, a pipe or a socket"),
        (["--config=runs"], "cannot read the configuration runs: it is a folder"),
        (["--data", "/dev/zero"], "cannot read /dev/zero: neither a file nor a folder"),
        (["--data", "pipe"], "/pipe: neither a file nor a folder"),
        (["--tokenizer", "/dev/zero"], "cannot read /dev/zero: it is no file but a device"),
        (["--tokenizer", "pipe"], "/pipe: it is no file but a device"),
        (
            ["--set", "run.folder=/dev/null"],
            "cannot make the folder of runs /dev/null: File exists",
        ),
        (["--data", __file__, "--dump-graphs=/dev/null/x"], "/dev/null/x: Not a directory"),
        (["--set", "data.cache_dir=/dev/null", "--data", __file__], "token cache /dev/null/"),
    ]
    # what is wrong with the data does not stand below a page of configuration
    Path("d.jsonl").write_text('{"txt": "words"}\n')
    cache = "--set=data.cache_dir=c"
    cases += [([f"--data={name}", cache], f"{name}") for name in ("d.jsonl", "gone.txt")]
    cases.append((["--tokenizer=gone", cache], "no tokenizer file"))
    for arguments, message in cases:
        assert train.main(["--preset=tiny", "--device=cpu", *arguments]) == 2, arguments
        said(capsys, message)
    assert sorted(path.name for path in Path("runs").iterdir()) == ["r"]


def test_a_sample_prompt_without_tokens_is_refused_before_the_run(run, capsys):
    Path("t.txt").write_text("the cat " * 2_000)
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"the": 0, "cat": 1}, unk_token="the"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save("w.json")
    flags = ["--preset=tiny", "--data=t.txt", "--tokenizer=w.json", "--set=data.cache_dir=c"]
    flags += ["--device=cpu", "--name=new", "--set=train.sample_prompt=' '"]
    assert train.main(flags) == 2
    assert "train.sample_prompt ' ' gives the ids []" in capsys.readouterr().err
    assert not Path("runs/new").exists()


def test_a_last_update_that_breaks_the_weights_costs_the_text_alone(run, capsys, monkeypatch):
    original = loop.Trainer.run

    def breaking(trainer, *arguments):
        code = original(trainer, *arguments)
        with torch.no_grad():
            trainer.model.norm.weight.fill_(float("nan"))
        return code

    monkeypatch.setattr(loop.Trainer, "run", breaking)
    assert resumed("--set=train.sample_tokens=3") == 0
    assert "warning: no text after training: the logits after" in capsys.readouterr().out
