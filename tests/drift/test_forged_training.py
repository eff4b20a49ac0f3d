"""Fingerprints of a training run edited with their checksums: one line, or a verdict."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import xxhash
from forge import damage_files, damage_json, damage_text, put
from test_training import train

from xtrain.drift.command import main
from xtrain.drift.comparison.training import compare_training

STEP = "rank_0000/step_00000001.json"
START = "rank_0000/start.json"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("training") / "a", ranks=2)


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
