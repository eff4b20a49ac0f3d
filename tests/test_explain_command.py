"""The explain command as a user meets it: help, mistakes; the example of docs/passes.md."""

from __future__ import annotations

import json
import logging
import re
import resource
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from training import running

import xtrain
from xtrain import ops
from xtrain.compiler import backend
from xtrain.config import RunConfig
from xtrain.explain.__main__ import main
from xtrain.passes.swaps.use_triton_rope import use_triton_rope

ROOT = Path(__file__).parent.parent


# --- mistakes -----------------------------------------------------------------------------------


def test_help_is_quick_and_imports_no_torch():
    script = """
import sys
import xtrain
from xtrain.config import RunConfig
from xtrain.explain.__main__ import main
try:
    main(["--help"])
except SystemExit as stop:
    assert stop.code == 0
assert not {"torch", "triton", "numpy", "transformers"} & set(sys.modules)
assert main(["nosuch"]) == 2
assert not {"torch", "triton", "transformers"} & set(sys.modules)
"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage: python -m xtrain.explain" in done.stdout
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 2.0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["smal"], "'smal' is no preset (tiny, small"),
        (["smal"], "did you mean small?"),
        (["tiny", "--grap"], "unknown argument '--grap'; did you mean --graph"),
        (["tiny", "--dropout", "0"], "--dropout must be in (0, 1], got 0"),
        (["tiny", "--dropout", "nan"], "--dropout must be in (0, 1], got nan"),
        (["tiny", "--layers", "0"], "argument --layers: must be at least 1, got 0"),
        (["tiny", "--hidden", "20"], "--hidden must be a multiple of 16, got 20"),
        (["tiny", "--set", "n_heads"], "--set takes key=value, got 'n_heads'"),
        (["tiny", "--set", "n_head=2"], "unexpected keyword argument 'n_head'"),
        (["tiny", "--kernels", "on"], "argument --kernels: invalid choice: 'on'"),
        (["tiny", "--html", "no/where.html"], "--html: there is no folder no"),
        (["tiny", "--disable-pass", "normalize"], "disable_passes names 'normalize'"),
        (["/"], "no config.json in /"),
        ([__file__], "is a file; MODEL is a Hugging Face config folder, or module:function"),
        (["no_such_module:f"], "cannot import 'no_such_module': ModuleNotFoundError"),
        (["explained_models:whol"], "explained_models has no 'whol'; did you mean whole?"),
        (["explained_models:number"], "explained_models:number must be a function, got int"),
        (["explained_models:nothing"], "must return an nn.Module, or (model, inputs); got int"),
        (["explained_models:raises"], "explained_models:raises() fails: RuntimeError: no weights"),
        (["explained_models:no_inputs"], "inputs cannot be guessed; return (model, inputs)"),
        (["explained_models:wrong_inputs"], "explained_models:wrong_inputs fails by itself"),
        (["explained_models:plain"], "no residual sites in explained_models:plain"),
        (["explained_models:whole", "--layers", "1"], "--layers, --hidden and --set change"),
        (["tiny", "--pass", "explained_models:spoil"], "the graph pass 'spoil' failed with"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, arguments, message):
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2
    assert error.startswith("error: ") and error.count("\n") == 1
    assert message in error


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["tiny", "--set", "vocab_size=99999999999"], r"would take at least [\d,]+ bytes"),
        (["tiny", "--layers", "99999999999"], r"would take at least [\d,]+ bytes"),
        (["tiny", "--batch", "99999999999"], r"--batch 99999999999, .* at least [\d,]+ bytes"),
        (["tiny", "--set", "rope_base=1" + "0" * 400], "rope_base must be a finite number"),
        (["tiny", "--set", "dim=" + "[" * 10_000], "dim must be a positive int"),
        (["tiny", "--set", "dropout=true"], "dropout must be a finite number, got True"),
        (["explained_models:whole", "--html", "/"], "cannot write /: Is a directory"),
        (["tiny", "--dump-graphs", "/dev/null/x"], "read or write /dev/null/x: Not a directory"),
        (["sys:exit"], r"sys:exit\(\) fails: SystemExit"),
        (["damaged"], "cannot read the configuration .*config.toml: .*line 1"),
        (["shapeless"], "run .*shapeless: .*missing .* 'dim'"),
    ],
)
def test_what_cannot_be_held_or_read_is_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    for name, text in (("damaged", "[model\n"), ("shapeless", "[model]\nvocab_size = 5")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and len(error) < 2100
    assert re.search(message, error), error


@pytest.mark.parametrize(
    "contents, message",
    [
        ("{", "cannot build"),
        ('{"model_type": "no_such_type"}', "cannot build"),
        ('{"model_type": "llama", "hidden_size": 30, "num_attention_heads": 7}', "cannot build"),
        ('{"model_type": "wav2vec2", "architectures": ["Wav2Vec2Model"]}', "takes input_values"),
    ],
)
def test_a_wrong_config_folder_is_one_line_and_exit_code_2(tmp_path, capsys, contents, message):
    (tmp_path / "config.json").write_text(contents)
    assert main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error


# --- --verify -----------------------------------------------------------------------------------


def test_verify_prints_its_verdict_and_a_failure_is_exit_code_1(tmp_path, capsys, monkeypatch):
    arguments = ["tiny", "--layers", "1", "--verify", "--json", str(tmp_path / "found.json")]
    assert main(arguments) == 0
    (said,) = re.findall(r"^verified: .*", capsys.readouterr().out, re.M)
    assert re.match(r"verified: 1 loss, 12 gradients of 1 graph .*; largest error 0", said)
    found = json.loads((tmp_path / "found.json").read_text())["verification"]
    assert (found["num_gradients"], found["failures"], found["left_out"]) == (12, [], [])

    def no_rotation(graph, **keywords):
        result = use_triton_rope(graph, **keywords)
        for node in [n for n in graph.nodes if n.target is ops.OPS["rope_qk"].forward]:
            node.update_arg(3, node.args[2])
        return result

    no_rotation.__name__ = "use_triton_rope"
    changed = [no_rotation if s is use_triton_rope else s for s in backend._SWAPS]
    monkeypatch.setattr(backend, "_SWAPS", tuple(changed))
    assert main(arguments) == 1
    (said,) = re.findall(r"^verified: .*", capsys.readouterr().out, re.M)
    assert "; FAILED: the loss is off by " in said and "by use_triton_rope" in said
    (failure,) = json.loads((tmp_path / "found.json").read_text())["verification"]["failures"]
    assert failure in said


# --- runs and presets ---------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [True, False])
def test_a_run_is_shown_as_it_was_trained(tmp_path, monkeypatch, capsys, compiled):
    """Its model, dropout, dtype and passes, the logits left out: the counts of its own first step.

    The trainer's report is the truth, read off a run whose backend stops before inductor's code.
    """
    reports = []
    original = xtrain.compile

    def compile_without_code(model, **keywords):
        backend = {"inductor": "aot_eager"}.get(keywords["backend"], keywords["backend"])
        reports.append(original(model, **{**keywords, "backend": backend}))
        return reports[-1]

    monkeypatch.setattr(xtrain, "compile", compile_without_code)
    with running(tmp_path) as runner:
        flags = ["--dropout=0.3", "--dtype=bf16", "--disable-pass=use_triton_rope", "--name=r"]
        assert runner("--steps=1", *flags, "--compile" if compiled else "--no-compile") == 0
    trained = reports.pop().report()
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main(["r", "--json", "-"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["options"]["dropout"], shown["options"]["dtype"]) == (0.3, "bf16")
    counts = [(row["name"], row["matched"], row["replaced"]) for row in shown["passes"]]
    assert counts == [(r.name, r.num_matched, r.num_replaced) for r in trained.passes]
    assert [site["name"] for site in shown["sites"]] == [site.name for site in trained.sites]
    assert len(counts) > 5 if compiled else len(counts) == 1
    assert main(["runs/r", "--dropout", "0.5", "--kernels", "off"]) == 0
    assert "dropout 0.5, existing skip, kernels off" in capsys.readouterr().out


def test_a_preset_is_called_as_the_trainer_calls_it(capsys):
    """Nor are the caller's logs and warnings other than before."""
    loggers = [logging.getLogger(name) for name in ("torch", "xtrain.passes")]
    before = [logger.level for logger in loggers], list(warnings.filters)
    assert main(["tiny"]) == 0
    assert ([logger.level for logger in loggers], list(warnings.filters)) == before
    text = capsys.readouterr().out
    assert "return_logits False: dropout 0.1" in text and "left alone: nothing" in text
    assert main(["tiny", "--layers=1", "--logits", "keep", "--set", "dropout=0.25"]) == 0
    text = capsys.readouterr().out
    assert "left alone:\n  1 x use_triton_linear_cross_entropy" in text
    assert "dropout 0.25, existing skip" in text


def test_a_run_without_dropout_has_no_sites_to_show(tmp_path, monkeypatch, capsys):
    config = RunConfig().override({"model.preset": "tiny", "model.n_layers": 1})
    (tmp_path / "runs" / "r").mkdir(parents=True)
    (tmp_path / "runs" / "r" / "config.toml").write_text(config.to_toml())
    monkeypatch.chdir(tmp_path)
    assert main(["r"]) == 0
    text = capsys.readouterr().out
    assert "residual sites: none, as dropout is 0; --dropout P shows them" in text
    assert main(["r", "--dropout", "0.1"]) == 0
    assert "blocks.0.attention" in capsys.readouterr().out


# --- docs/passes.md -----------------------------------------------------------------------------


def test_the_example_of_docs_passes_runs_as_pasted(capsys):
    """Twice by two ways of adding it, with the counts that the page shows and GELU's tanh form."""
    page_text = (ROOT / "docs/passes.md").read_text()
    example = re.search(r"```python\n(.*?)```", page_text, re.S)[1]
    shown = re.search(r"```\n(pass +matched.*?)```", page_text, re.S)[1]
    names = {"__name__": "__main__"}
    exec(compile(example, "passes.md", "exec"), names)
    columns = r"^(\w+) +(\d+) +(\d+) +(\d+ -> \d+)"
    rows = re.findall(columns, capsys.readouterr().out, re.M)
    assert re.findall(columns, shown, re.M) == rows[:3] and len(rows) > 3

    def block(b, x):
        return x + b.down(F.gelu(b.up(b.norm(x)), approximate="tanh"))

    model, x = names["model"], names["x"]
    expected = block(model[1], block(model[0], x))
    assert not torch.equal(model(x), expected)
    assert torch.equal(names["compiled"].eval()(x), expected)
    again = names["again"].report().passes
    assert [r.name for r in again[:3]] == ["insert_residual_dropout", "normalise", "use_tanh_gelu"]
    assert again[2].num_replaced == 2
