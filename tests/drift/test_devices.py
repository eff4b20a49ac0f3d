"""The study's section on records that were made on another machine."""

from __future__ import annotations

import pytest

from bench import drift_devices
from xtrain.drift.command import main


def test_the_section_of_the_study(tmp_path, capfd):
    shared = ["tiny", "--tokens=2", "--num-prompts=2", "--threads=1"]
    for name, *flags in (("devices",), ("bf16", "--dtype=bf16"), ("other", "--seed=1")):
        assert main(["record", f"--out={tmp_path}/{name}.drift", *shared, *flags]) == 0
    text = drift_devices.section(tmp_path, [tmp_path / "bf16.drift"])
    row = next(line for line in text.splitlines() if "bf16 |" in line).split("|")
    assert row[3].strip() == "embedding: aten.embedding" and "(" in row[4]
    assert int(row[7]) <= 4 and "2 built-in prompts x 2 tokens" in text
    with pytest.raises(SystemExit, match=r"other\.drift: other"):
        drift_devices.section(tmp_path, [tmp_path / "other.drift"])
