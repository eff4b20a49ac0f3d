"""What the repository says of itself: the first screen of its README, the table of faults."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import planted_faults

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_pasted_example_prints_what_is_shown(capsys):
    example, shown = re.search(r"```python\n(.*?)```\n```\n(.*?)```", README, re.S).groups()
    assert len(example.strip().splitlines()) == 12
    exec(compile(example, "README.md", "exec"), {"__name__": "__main__"})
    output = capsys.readouterr().out
    for site in ("layers.0.attention", "layers.0.feed_forward", "layers.1.attention"):
        assert f"model.{site}" in output and f"model.{site}" in shown
    hashes = dict(re.findall(r"^(\w+ \w+) ([0-9a-f]{12})$", output, re.M))
    ours = {hashes[f"xtrain {mode}"] for mode in ("eager", "inductor", "checkpointed", "bf16")}
    assert len(ours) == 1 and ours.pop() in shown
    assert hashes["torch eager"] != hashes["torch inductor"]


def test_the_table_is_the_reports():
    """Tokens/s of the README's table against the committed measurement."""
    report = json.loads((ROOT / "bench/results/compare_124m_h200_2026-11.json").read_text())
    text = json.dumps(report)
    markdown = (ROOT / "bench/results/compare_124m_h200_2026-11.md").read_text()
    rows = re.findall(r"^\| \**(?:xtrain|torch|eager)[^|]*\| (\d+)k \|", README, re.M)
    in_report = {
        round(int(n.replace(",", "")) / 1000) for n in re.findall(r"\d{3},\d{3}", markdown)
    }
    assert len(rows) == 4 and {int(n) for n in rows} <= in_report
    assert "NVIDIA H200" in text
    for ratio in ("1.043 [1.027, 1.062]", "1.026 [1.018, 1.038]", "0.1% [-0.7, 1.8]"):
        assert ratio in README and ratio in markdown


def _rows(report: str) -> list[str]:
    return [line for line in report.splitlines() if line.startswith("| transformers + ")]


def test_the_kernels_table_is_the_reports():
    """Every row of the README's table of ops, and the ratios beside it, against the reports."""
    report = (ROOT / "bench/results/ops_h200_2026-11.md").read_text()
    glance = {re.sub(" +", " ", line) for line in report.splitlines() if line.startswith("|")}
    rows = re.findall(r"^\| [a-z_]+, .*bf16 \|.*$", README, re.M)
    assert len(rows) == 12 and set(rows) <= glance
    assert "99 of 108 targets were met" in report and "99 of the report's 108 targets" in README
    for ratio in ("0.983 [0.966, 1.013]", "1.022 [1.006, 1.050]"):
        assert ratio in README and ratio in report
    small = (ROOT / "bench/results/compare_124m_b1_h200_2026-11.md").read_text()
    assert "0.899 [0.699, 0.962]" in README and "0.899 [0.699, 0.962]" in small
    llama = (ROOT / "bench/results/compare_hf_1b_h200_2026-11.md").read_text()
    for ratio in ("1.260 [1.251, 1.262]", "1.157 [1.153, 1.162]"):
        assert ratio in README and ratio in llama
    blocks = (ROOT / "bench/results/compare_hf_1b_blocks_h200_2026-11.md").read_text()
    first_step = {row.split("|")[1].strip(): row.split("|")[5].strip() for row in _rows(blocks)}
    assert "first step takes 32.9 s, 12.3 s under `xtrain.compile_blocks` and 48.7 s" in README
    assert first_step["transformers + xtrain.compile, dropout"] == "32.9"
    assert first_step["transformers + xtrain.compile_blocks"] == "12.3"
    assert first_step["transformers + torch.compile"] == "48.7"
    coverage = (ROOT / "docs/coverage.md").read_text()
    assert "Of 145 classes" in coverage and "144 come out exact" in coverage
    assert "Of the 145 causal language models" in README and "144 come out exact" in README


# --- planted faults -------------------------------------------------------------------------------


def test_each_fault_has_its_place_and_its_test():
    """A change that moves a line carries its fault along; `old` is that line as it is now."""
    faults = planted_faults.faults()
    planted_faults.places(faults)
    assert all(fault.old != fault.new for fault in faults)
    counts = Counter(fault.area for fault in faults)
    assert set(counts) == set(planted_faults.AREAS) and min(counts.values()) >= 8
    assert len({fault.name for fault in faults}) == len(faults) >= 60


def test_a_planted_fault_is_caught():
    """The tests that the tool runs import the copy that holds the fault, not the tree."""
    tool = [sys.executable, "tests/planted_faults.py", "--only", "layer and site swapped"]
    done = subprocess.run(tool, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "1 faults, 0 missed" in done.stdout, done.stdout + done.stderr
