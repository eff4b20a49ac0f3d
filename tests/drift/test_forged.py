"""Damaged and forged records: one line and exit code 4 or 5, whatever was done to them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import pytest
from drift_models import Rowwise, prompts, subject, tokens
from forge import copied, damage, edited, put, redo_manifest, with_tensors

from xtrain.drift import DriftError, Record, compare, record
from xtrain.drift.cli import main
from xtrain.drift.recording.forwards import record_prompts
from xtrain.drift.settings import Run


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Two prompts of two lengths with three tokens each, tensors kept; and one forward."""
    folder = tmp_path_factory.mktemp("forged")
    settings = Run(num_tokens=3, tensors=True)
    record_prompts(subject(Rowwise()), prompts([1, 2, 3], [4]), settings, out=folder / "decoded")
    record(Rowwise(), tokens(batch=2), out=folder / "forward")
    return folder


def verdict(capfd, a, b, *flags):
    """Return the exit code of compare and what it said on stderr."""
    code = main(["compare", str(a), str(b), *map(str, flags)])
    return code, capfd.readouterr().err


def refused(capfd, a, b):
    """Both ways round: exit code 5 and one line, which is returned."""
    for pair in ((a, b), (b, a)):
        code, said = verdict(capfd, *pair)
        assert code == 5, (code, said)
        assert said.count("\n") == 1 and said.startswith("error: ")
    return said


def remove(*where):
    def edit(values):
        for key in where[:-1]:
            values = values[key]
        del values[where[-1]]

    return edit


def swap(one, other, *where):
    def edit(values):
        for key in where:
            values = values[key]
        values[one], values[other] = values[other], values[one]

    return edit


def other_token(step):
    step["tokens"] = [(step["tokens"][0] + 1) % 16]


FORGED = [
    ("case_0000.json", remove("steps", 2), "steps are 2, not 3"),
    ("case_0001.json", remove("steps", 0), "steps are 2, not 3"),
    ("case_0000.json", swap(0, 1, "steps"), "length"),
    ("case_0000.json", put([], "steps"), "steps are 0"),
    ("record.json", remove("prompts", 1), "case_0001"),
    ("record.json", lambda v: v["prompts"].append(v["prompts"][0]), "case_0002"),
    ("record.json", swap(0, 1, "prompts"), "length"),
    ("record.json", remove("tables", 0, 3), "tensor step_0000/ops/hash"),
    ("record.json", swap(0, 1, "tables"), "tensor"),
    ("record.json", put("I64", "tables", 0, 0, 2), "tensor step_0000/00000"),
    ("record.json", put(2, "run", "num_tokens"), "steps are 3, not 2"),
    ("record.json", put(10**30, "run", "num_tokens"), "run.num_tokens is 1000"),
    ("record.json", put(-1, "run", "batch_size"), "run.batch_size is -1"),
    ("record.json", put("beam", "run", "decode"), "run.decode is 'beam'"),
    ("record.json", put(None, "run", "decode"), "steps are 3, not 1"),
    ("record.json", put(False, "run", "tensors"), "values_0000.safetensors"),
    ("record.json", put({"differs": True}, "observer_effect"), "observer_effect.max_abs"),
    ("record.json", put("x", "model", "weights", 0, "samples"), "model.weights[0].samples"),
    ("record.json", put(-3, "model", "weights", 0, "shape", 0), "model.weights[0].shape"),
    ("record.json", put("F99", "model", "weights", 0, "dtype"), "model.weights[0].dtype"),
    ("record.json", lambda v: v["model"]["weights"].append(v["model"]["weights"][0]), "twice"),
    ("record.json", put([], "environment"), "record.json is damaged: environment is []"),
    ("record.json", remove("run", "decode"), "record.json is damaged: run.decode is missing"),
    ("record.json", put(3, "model", "weights"), "record.json is damaged: model.weights is 3"),
    ("record.json", put([], "prompts"), "record.json is damaged: prompts is []"),
    ("record.json", put({"a": 1}, "observer_effect"), "observer_effect.differs is missing"),
    ("case_0000.json", put(None, "steps", 0, "tokens"), "damaged: steps[0].tokens is None"),
    ("case_0000.json", put([], "steps", 0, "margin"), "damaged: steps[0].margin has 0 numbers"),
    ("case_0000.json", put(99, "steps", 0, "ops_table"), "damaged: steps[0].ops_table is 99"),
    ("case_0000.json", put(3, "steps"), "case_0000.json is damaged: steps is 3"),
    # what compare does not look at, but which is in the record twice
    ("case_0000.json", put(9.0, "steps", 0, "margin", 0), "steps[0].margin"),
    ("case_0001.json", put(9.0, "steps", 1, "top_logits", 0, 2), "steps[1].top_logits"),
    ("case_0000.json", put(99, "steps", 0, "top_ids", 0, 0), "steps[0].top_ids"),
    ("case_0000.json", swap(0, 1, "steps", 0, "top_ids", 0), "steps[0].top_logits"),
    ("case_0000.json", put(0, "steps", 2, "length"), "steps[2].length"),
    ("case_0000.json", lambda v: other_token(v["steps"][1]), "steps[1].tokens are not the largest"),
]


@pytest.mark.parametrize(("name", "edit", "message"), FORGED, ids=range(len(FORGED)))
def test_a_forged_record_is_one_line(base, tmp_path, capfd, name, edit, message):
    forged = edited(base / "decoded", tmp_path / "b", name, edit)
    assert message in refused(capfd, base / "decoded", forged)


BROKEN = [
    ("record.json", "cut", "bytes, not"),
    ("record.json", "edit", "was changed after it was written"),
    ("case_0000.safetensors", "cut", "bytes, not"),
    ("case_0000.safetensors", "edit", "was changed after it was written"),
    ("case_0000.json", "delete", "case_0000.json is missing"),
    ("manifest.json", "cut", "is damaged"),
    ("manifest.json", "delete", "is no complete record: manifest.json is missing"),
    ("manifest.json", "version", "has schema version 3, this xtrain reads 1 to 2"),
    ("manifest.json", "foreign", "is no record"),
    ("manifest.json", "list", "is no record"),
    ("manifest.json", "files", "manifest.json is damaged"),
]


@pytest.mark.parametrize(("name", "how", "message"), BROKEN)
def test_a_broken_record_is_one_line(base, tmp_path, name, how, message):
    out = copied(base / "forward", tmp_path / "a.drift")
    file = out / name
    text = file.read_bytes()
    if how == "cut":
        file.write_bytes(text[: len(text) // 2])
    elif how == "edit":
        file.write_bytes(text[:-9] + bytes([text[-9] ^ 1]) + text[-8:])
    elif how == "delete":
        file.unlink()
    else:
        contents = json.loads(text)
        contents |= {"version": 3} if how == "version" else {}
        contents |= {"format": "other"} if how == "foreign" else {}
        contents |= {"files": ["record.json"]} if how == "files" else {}
        file.write_text(json.dumps([] if how == "list" else contents))
    with pytest.raises(DriftError, match=message) as caught:
        Record(out)
    assert "\n" not in str(caught.value)


def test_the_length_of_a_single_forward(base, tmp_path, capfd):
    forged = edited(
        base / "forward", tmp_path / "b", "case_0001.json", put(8, "steps", 0, "length")
    )
    assert "steps[0].length is not 9" in refused(capfd, base / "forward", forged)


def remove_last(header, data, key, entry):
    return data[: header.pop(key)["data_offsets"][0]]


def rename(header, data, key, entry):
    header["step_0009/logits"] = header.pop(key)


def copy_last(header, data, key, entry):
    size = entry["data_offsets"][1] - entry["data_offsets"][0]
    header["more"] = {**entry, "data_offsets": [len(data), len(data) + size]}
    return data + data[-size:]


def overlap(header, data, key, entry):
    header[key] = header[min(header, key=lambda k: header[k]["data_offsets"])]


TENSORS = {
    "remove": remove_last,
    "rename": rename,
    "copy": copy_last,
    "dtype": lambda header, data, key, entry: entry.update(dtype="I32"),
    "shape": lambda header, data, key, entry: entry.update(shape=[1, *entry["shape"]]),
    "overlap": overlap,
}


@pytest.mark.parametrize("how", TENSORS)
@pytest.mark.parametrize("name", ["case_0000.safetensors", "values_0001.safetensors"])
def test_forged_tensors_are_one_line(base, tmp_path, capfd, name, how):
    def edit(header, data):
        # the last one: without it the others still fill the file
        key = max(header, key=lambda k: header[k]["data_offsets"][1])
        changed = TENSORS[how](header, data, key, header[key])
        return data if changed is None else changed

    forged = with_tensors(base / "decoded", tmp_path / "b", name, edit)
    assert name.split(".")[0] in refused(capfd, base / "decoded", forged)


def zeroed(tensor, size):
    """An edit that makes the first bytes of a tensor zero."""

    def edit(header, data):
        start = header[tensor]["data_offsets"][0]
        return data[:start] + bytes(size) + data[start + size :]

    return edit


@pytest.mark.parametrize(
    ("name", "tensor", "size", "messages"),
    [
        ("case_0001", "step_0000/ops/statistics", 8, ("embedding: aten.embedding", "statistics")),
        ("case_0001", "step_0000/ops/samples", 8, ("embedding: aten.embedding", "samples")),
        ("case_0000", "step_0000/rows/0001", 4, ("layers.1: output",)),
    ],
)
def test_what_follows_from_equal_bits_is_equal(base, tmp_path, capfd, name, tensor, size, messages):
    """One number edited: the hash is as it was, and so compare looked away."""
    edit = zeroed(tensor, size)
    forged = with_tensors(base / "forward", tmp_path / "b", f"{name}.safetensors", edit)
    said = refused(capfd, base / "forward", forged)
    assert all(message in said for message in messages)


@pytest.mark.parametrize(("name", "code"), [("values_0001", 5), ("case_0001", 1)])
def test_a_number_that_was_edited_is_never_identical(base, tmp_path, capfd, name, code):
    """Of a whole tensor the hash tells; a logit that nothing else repeats is a difference."""
    edit = lambda header, data: data[:-1] + bytes([data[-1] ^ 1])  # noqa: E731
    forged = with_tensors(base / "decoded", tmp_path / "b", f"{name}.safetensors", edit)
    found, said = verdict(capfd, base / "decoded", forged)
    assert found == code and ("has not the hash" in said) == (code == 5)


NO_JSON = ['{"a": NaN}', '{"text": Infinity}', '{"text": null, "text": null}', "[" * 100_000]
NO_JSON += ['{"text": 1e999}', '{"text": ' + "9" * 5000 + "}", "", "\ufeff{}"]


@pytest.mark.parametrize("text", NO_JSON, ids=range(8))
@pytest.mark.parametrize("name", ["case_0000.json", "record.json", "manifest.json"])
def test_what_is_no_json_is_one_line(base, tmp_path, capfd, name, text):
    forged = copied(base / "decoded", tmp_path / "b")
    (forged / name).write_text(text)
    if name != "manifest.json":
        redo_manifest(forged)
    assert f"{name} is damaged" in refused(capfd, base / "decoded", forged)


def test_files_beside_a_record_are_none_of_it(base, tmp_path, capfd):
    """A folder in version control gathers such things; a file named as one of ours is refused."""
    more = copied(base / "decoded", tmp_path / "b")
    (more / ".gitattributes").write_text("* -text\n")
    (more / "notes").mkdir()
    assert verdict(capfd, base / "decoded", more) == (0, "")
    (more / "case_0002.json").write_text("{}")
    assert "case_0002.json" in refused(capfd, base / "decoded", more)


def test_a_file_that_is_no_file(base, tmp_path, capfd):
    for name in ("case_0001.json", "manifest.json", "case_0000.safetensors"):
        for make in ("folder", "dangling", "loop"):
            file = copied(base / "decoded", tmp_path / "b") / name
            file.unlink()
            if make == "folder":
                file.mkdir()
            else:
                file.symlink_to(name if make == "loop" else "nowhere")
            assert name in refused(capfd, base / "decoded", tmp_path / "b")


def test_links_to_the_files_and_the_folder_are_followed(base, tmp_path, capfd):
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in (base / "decoded").iterdir():
        (linked / path.name).symlink_to(path)
    (tmp_path / "folder").symlink_to(base / "decoded")
    for path in (linked, tmp_path / "folder"):
        assert verdict(capfd, base / "decoded", path) == (0, "")


@pytest.mark.parametrize("name", ["../outside.json", "/etc/hostname", "", ".", "a/b"])
def test_a_manifest_names_files_of_its_own_folder_alone(base, tmp_path, capfd, name):
    forged = copied(base / "decoded", tmp_path / "b")
    manifest = json.loads((forged / "manifest.json").read_text())
    manifest["files"][name] = manifest["files"]["record.json"]
    (forged / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "outside.json").write_bytes((forged / "record.json").read_bytes())
    assert "manifest.json" in refused(capfd, base / "decoded", forged)


@pytest.mark.parametrize("path", ["x" * 5000, "a\x00b", "/dev/null", "/proc/self/mem"])
def test_paths_that_are_none(base, capfd, path):
    refused(capfd, base / "decoded", path)


@pytest.mark.parametrize("kind", ["decoded", "forward"])
@pytest.mark.parametrize("seed", range(4))
def test_no_damage_ends_in_an_internal_error(base, tmp_path, capfd, monkeypatch, kind, seed):
    """A verdict or one line for everything; the seed makes a failure repeatable.

    Plots are made and not drawn, which is all that they would do to the time of this.
    """
    monkeypatch.setattr("xtrain.report._svg", lambda figure, title, tips: title)
    rng = random.Random(f"{kind} {seed}")
    for turn in range(80):
        forged = copied(base / kind, tmp_path / "b")
        name = damage(forged, rng)
        pair = (base / kind, forged) if rng.random() < 0.5 else (forged, base / kind)
        flags = ["--json", tmp_path / "x.json", "--html", tmp_path / "x.html"]
        code, said = verdict(capfd, *pair, *flags)
        note = (kind, seed, turn, name, code, said)
        assert 0 <= code <= 5, note
        assert said.count("\n") == (code == 5) and "Traceback" not in said, note


def test_the_honest_records_are_identical_to_themselves(base):
    for kind in ("decoded", "forward"):
        assert compare(base / kind, base / kind).exit_code == 0


@pytest.mark.parametrize("text", ["caf\u00e9 \u4e2d", "half a pair: \ud83d"], ids=ascii)
def test_a_prompt_that_stdout_cannot_show_is_escaped(base, tmp_path, text):
    """Texts come from tokenizers, and stdout may be ASCII: neither is an error."""
    source = base / "decoded"
    for number in range(2):  # whichever prompt is shown
        prompt, case = put(text, "prompts", number, "text"), put("on", "text")
        source = edited(source, tmp_path / f"prompt{number}", "record.json", prompt)
        source = edited(source, tmp_path / f"case{number}", f"case_000{number}.json", case)
    command = [sys.executable, "-m", "xtrain.drift", "compare", source, source]
    done = subprocess.run(
        [*command, "--html", tmp_path / "x.html"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u" in done.stdout or "\\x" in done.stdout
    assert (tmp_path / "x.html").read_text(encoding="utf-8").endswith("</html>\n")
