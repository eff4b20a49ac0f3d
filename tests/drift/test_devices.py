"""The study's section on records that were made on another machine."""

from __future__ import annotations

import pytest

from bench.drift import records
from xtrain.drift import compare
from xtrain.drift.command import main


def test_the_section_of_the_study(tmp_path, capfd):
    shared = ["tiny", "--tokens=2", "--num-prompts=2", "--threads=1"]
    for name, *flags in (("devices",), ("bf16", "--dtype=bf16"), ("other", "--seed=1")):
        assert main(["record", f"--out={tmp_path}/{name}.drift", *shared, *flags]) == 0
    text = records.machines(tmp_path, [tmp_path / "bf16.drift"], [])
    row = next(line for line in text.splitlines() if "bf16 |" in line).split("|")
    assert row[3].strip() == "embedding: aten.embedding" and "(" in row[4]
    assert int(row[7]) <= 4 and "2 built-in prompts x 2 tokens" in text
    with pytest.raises(SystemExit, match=r"other\.drift: other"):
        records.machines(tmp_path, [tmp_path / "other.drift"], [])


def test_the_trained_run_on_two_machines(tmp_path, capfd):
    """Its pieces find their partners by their prompts, and each setting is one row."""
    (tmp_path / "first.json").write_text("[[1, 2, 3], [4, 5, 6]]")
    (tmp_path / "second.json").write_text("[[7, 8]]")
    made = []
    for out, prompts, *flags in (
        ("a_1", "second"),
        ("a_0", "first"),
        ("b_0", "first", "--dtype=bf16"),
        ("b_1", "second", "--dtype=bf16"),
    ):
        made.append(tmp_path / f"{out}.drift")
        arguments = ["record", "tiny", "--tokens=12", "--threads=1", f"--out={made[-1]}", *flags]
        assert main([*arguments, f"--prompts={tmp_path}/{prompts}.json"]) == 0
    text = records.machines(tmp_path, made[2:], made[:2])
    row = [cell.strip() for cell in text.splitlines()[-1].split("|")]
    assert row[1].endswith("bf16") and row[2] == "embedding: aten.embedding" and row[3] == "3"
    assert "drawn by NumPy" not in text and "12 tokens each" in text
    comparisons = [compare(a, b) for a, b in ((made[1], made[2]), (made[0], made[3]))]
    shifts = [place.shift for c in comparisons for place in c.positions]
    assert row[4] == str(len(shifts)) and row[5] == f"{max(shifts):.3g}"
