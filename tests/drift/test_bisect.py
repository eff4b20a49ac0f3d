"""bisect and ops: children under settings, what their equality says, and the picture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from xtrain.drift import bisect, single_ops
from xtrain.drift.bisect import Factor, Plan, Trial, effects, equal_sets, interactions, run_child
from xtrain.drift.cli import main
from xtrain.drift.single_ops import OpRow, picture

SITE = """
import os
from torch.nn import functional as F
silu = F.silu
if os.environ.get("DRIFT_A") == "1":
    F.silu = lambda x: silu(x) * (1 + 2.0 ** -10)
if os.environ.get("DRIFT_B") == "1":
    last = F.silu
    F.silu = lambda x: silu(x) if last is not silu else silu(x) * (1 - 2.0 ** -10)
"""


def test_a_factor_that_another_takes_back(tmp_path, monkeypatch, capfd):
    """Each of two variables moves SiLU, both together do not; a third does nothing."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    flags = ["--tokens=1", "--num-prompts=2", "--threads=1", "--warm-up=0"]
    factor_flags = ["--factor=DRIFT_A=0,1", "--factor=DRIFT_B=unset,1"]
    out = tmp_path / "result.json"
    code = main(["bisect", "tiny", *flags, *factor_flags, "--json", str(out)])
    found = json.loads(out.read_text())
    text = capfd.readouterr().out
    assert code == found["exit_code"] and code in (1, 2, 3)
    names = {run["setting"]: run["group"] for run in found["runs"]}
    assert names == {
        "baseline": "A",
        "DRIFT_A=1": "B",
        "DRIFT_B=1": "C",
        "DRIFT_A=1 DRIFT_B=1": "A",
    }
    first = [run["first_divergence"] for run in found["runs"]]
    # what is moved is a product of its own, behind SiLU
    assert first[0] is None and first[3] is None
    assert first[1] == first[2] == "blocks.0.feed_forward: aten.mul"
    assert found["sets"] == [["baseline", "DRIFT_A=1 DRIFT_B=1"], ["DRIFT_A=1"], ["DRIFT_B=1"]]
    assert found["interactions"] == [
        ["DRIFT_A=1 DRIFT_B=1", "each changes the numbers, together they cancel"]
    ]
    assert "4 runs, 3 sets of equal bits" in text and "together they cancel" in text


def plan_of(groups_of, *values):
    """A plan with factors A, B, ... whose runs have the groups that a function of values gives."""
    plan = Plan([Factor(name, tuple(some)) for name, some in zip("ABC", values, strict=False)])
    for setting in plan.settings():
        group = groups_of(*map(int, plan.named(setting).values()))
        plan.runs[setting] = Trial(group=group, error="killed" if group is None else None)
    return plan


CANCEL = "each changes the numbers, together they cancel"
ALL = "no one and no pair has an effect, all have"
NONE = "each changes the numbers, all together cancel"


@pytest.mark.parametrize(
    ("groups_of", "num_factors", "expected"),
    [
        (lambda a, b, c: a & b, 3, ("A=1 B=1", "neither has an effect alone, together they have")),
        (lambda a, b: a * (1 + b), 2, ("A=1 B=1", "B=1 has an effect only where A=1")),
        (lambda a, b: a & ~b, 2, ("A=1 B=1", "B=1 takes back what A=1 does")),
        (lambda a, b: a + 2 * b, 2, None),  # independent of each other
        (
            lambda a, b, c: a & b & c,
            3,
            ("A=1 B=1 C=1", "no one and no pair has an effect, all have"),
        ),
        (
            lambda a, b, c: (a + 2 * b + 4 * c) % 7,
            3,
            ("A=1 B=1 C=1", "each changes the numbers, all together cancel"),
        ),
        # A and B cancel, so that of all three C is left: a pair says it
        (lambda a, b, c: (a ^ b) + 2 * c, 3, ("A=1 B=1", CANCEL)),
    ],
)
def test_what_acts_or_cancels_only_together(groups_of, num_factors, expected):
    plan = plan_of(groups_of, *["01"] * num_factors)
    assert interactions(plan) == ([expected] if expected else [])
    assert len(plan.runs) == (8 if num_factors == 3 else 4)


def test_what_each_value_does():
    nothing = plan_of(lambda a, b, c: a & b, "01", "01", "01")
    assert dict(effects(nothing)) == dict.fromkeys("ABC", "no effect alone")
    assert equal_sets(nothing)[0][0] == () and len(equal_sets(nothing)) == 2
    independent = plan_of(lambda a, b: a + 2 * b, "01", "01")
    assert dict(effects(independent))["B"] == "changes the numbers at 1"
    killed = plan_of(lambda a, b: None if a else b, "01", "01")
    words = "nothing could be compared: no result at 1"
    assert effects(killed) == [("A", words), ("B", "changes the numbers at 1")]
    assert killed.not_compared() == ["A"]
    assert interactions(killed) == [] and len(killed.runs) == 3  # no pair with the dead one
    beside = plan_of(lambda a: None if a == 1 else 0, "012")
    assert effects(beside) == [("A", "no effect; no result at 1")] and beside.not_compared() == []


def test_all_at_once_leaves_out_what_cannot_run():
    """Of a dead last value the last one that runs stands in; the run would say nothing else."""
    plan = plan_of(lambda a, b, c: None if a == 2 else 0, "012", "01", "01")
    assert plan.everything() == [(("A", "1"), ("B", "1"), ("C", "1"))]
    plan.runs[("A", "1"),] = Trial(error="killed")
    assert plan.everything() == []  # the pair of B and C is all that is left


@pytest.mark.parametrize(("works", "code"), [(False, 4), (True, 0)], ids=str)
def test_the_exit_code_where_a_factor_has_nothing_to_compare(tmp_path, capfd, works, code):
    """0 would say that all its values give equal bits; another factor's do."""
    broken = script(tmp_path / "broken", "#!/bin/sh\necho error: no such thing >&2\nexit 5\n")
    other = script(tmp_path / "other", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    values = [sys.executable, broken, *([other] if works else [])]
    flags = ["--tokens=1", "--num-prompts=1", "--threads=1", "--warm-up=0", "--json", "-"]
    flags += [f"--factor=python={','.join(values)}"]
    flags += [] if works else ["--factor=DRIFT_NOTHING=unset,1"]
    assert main(["bisect", "tiny", *flags]) == code
    found = json.loads(capfd.readouterr().out)
    assert found["exit_code"] == code and found["runs"][1]["error"] == "no such thing"
    words = dict(found["effects"])
    assert words.get("DRIFT_NOTHING", "no effect alone") == "no effect alone"
    expected = "no effect; " if works else "nothing could be compared: "
    assert words["python"] == f"{expected}no result at {broken}"


def script(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_children(tmp_path, monkeypatch):
    monkeypatch.setenv("DRIFT_KEPT", "yes")
    monkeypatch.setenv("DRIFT_GONE", "yes")
    show = script(tmp_path / "show", '#!/bin/sh\necho "$DRIFT_KEPT $DRIFT_NEW [$DRIFT_GONE] $*"\n')
    setting = {"python": show, "DRIFT_NEW": "new", "DRIFT_GONE": "unset", "threads": "2"}
    setting |= {"compile": "on", "pad-to": "9"}
    done = run_child(["record", "x"], setting)
    assert done.error is None and done.output == (
        "yes new [] -m xtrain.drift record x --threads=2 --mode=inductor --pad-to=9\n"
    )
    killed = script(tmp_path / "killed", "#!/bin/sh\nkill -ILL $$\n")
    assert run_child([], {"python": killed}).error == "killed by SIGILL"
    failed = script(tmp_path / "failed", "#!/bin/sh\necho noise >&2\necho error: why >&2\nexit 5\n")
    assert run_child([], {"python": failed}).error == "why"
    environment = tmp_path / "venv" / "bin"
    environment.mkdir(parents=True)
    os.symlink(sys.executable, environment / "python")
    assert bisect.interpreter(str(tmp_path / "venv")) == str(environment / "python")


def test_a_signal_of_one_value_in_the_whole_command(tmp_path, capfd):
    """An instruction set that this CPU lacks would end the child just so."""
    killed = script(tmp_path / "killed", "#!/bin/sh\nkill -ILL $$\n")
    flags = [
        "--tokens=1",
        "--num-prompts=1",
        "--threads=1",
        f"--factor=python={sys.executable},{killed}",
    ]
    assert main(["bisect", "tiny", *flags, "--keep", str(tmp_path / "kept")]) == 4
    text = capfd.readouterr().out
    assert "killed by SIGILL" in text
    assert text.endswith(f"python: nothing could be compared: no result at {killed}\n")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["000.drift"]
    swapped = [f"--factor=python={killed},{sys.executable}"]
    assert main(["bisect", "tiny", *flags[:-1], *swapped]) == 5
    assert "the baseline has no result: killed by SIGILL" in capfd.readouterr().err


# --- ops -----------------------------------------------------------------------------------------


def test_the_inputs_are_integers_scaled_and_the_hashes_those_of_the_results():
    from xtrain.drift.single_ops import LENGTHS, draw, hashes, ops

    x = draw(3, 7)
    assert x.dtype == torch.float32 and torch.equal(x, draw(3, 7))
    whole = (x.double() + 2) * 2**22
    assert torch.equal(whole, whole.round()) and x.min() >= -2 and x.max() < 2
    assert draw(200, 200).double().mean().abs() < 5 * (4 / 12**0.5) / 200
    found = hashes(2, torch.float32, "cpu")
    assert set(found) == set(ops()) and all(len(row) == len(LENGTHS) for row in found.values())
    assert all(all(row) for row in found.values())  # every op runs at every length
    half = hashes(2, torch.bfloat16, "cpu")
    assert half["mm"] != found["mm"]


def test_ops_of_two_instruction_sets(capfd, tmp_path):
    """torch's CPU kernels on x86: softmax from 2, layer_norm from 8, SiLU from 1."""
    out = tmp_path / "ops.json"
    arguments = ["ops", "--factor=ATEN_CPU_CAPABILITY=default,avx2", "--json", str(out)]
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        assert main(arguments) == 0  # a machine with one set of kernels
        return
    assert main(arguments) == 1
    first = {row["op"]: row["first"] for row in json.loads(out.read_text())}
    assert (first["softmax"], first["layer_norm"], first["silu"]) == (2, 8, 1)
    assert [first[name] for name in ("mm", "mean", "rsqrt", "add", "mul")] == [None] * 5
    text = capfd.readouterr().out
    assert "softmax        .###" in text and "mm             ...." in text


def test_ops_that_depend_on_the_number_of_threads(tmp_path, monkeypatch, capfd):
    """One sum and one query's keys are shared out among threads; rows of their own are not."""

    def in_process(arguments, setting):  # a number of threads can be set in any
        code = main([*arguments, *(f"--{name}={value}" for name, value in setting.items())])
        return bisect.Result(code, capfd.readouterr().out, None)

    monkeypatch.setattr(single_ops, "run_child", in_process)
    out = tmp_path / "ops.json"
    assert main(["ops", "--factor=threads=1,2", "--json", str(out)]) == 1
    moved = {row["op"] for row in json.loads(out.read_text()) if row["first"]}
    assert moved == {"sum_all", "sdpa_one_query"}


def test_the_picture():
    lengths = (*range(1, 65), 128, 1000)
    some = "".join("#" if n in (2, 3, 9, 128) else "." for n in lengths)
    rows = [OpRow("mm", lengths, "." * len(lengths)), OpRow("softmax", lengths, some)]
    text = picture(rows, [Factor("threads", ("1", "2"))])
    lines = text.splitlines()
    assert lines[0] == "threads=1 and threads=2: # other bits, . the same"
    assert lines[4].startswith("softmax        .##.....#...") and lines[5].startswith("mm  ")
    assert lines[4].endswith(".    #    .")
    assert "2-3, 9, 128" in lines[-1] and rows[1].first == 2 and rows[0].first is None
    same = picture(rows[:1], [Factor("threads", ("1", "2"))])
    assert same.endswith("every op keeps its bits at every length\n")
    assert np.array_equal([row.first for row in rows], [None, 2])


# --- one package at a time -----------------------------------------------------------------------


def test_one_package_of_another_environment(tmp_path):
    """Of two packages there, one is put before this environment's own; its neighbour is not."""
    site = tmp_path / "site"
    for name, version in (("safetensors", "9.9"), ("numpy", "8.8")):
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text(f"__version__ = {version!r}\n")
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (site / "only_there.py").write_text("here = True\n")
    here = bisect.listing(sys.executable)
    assert here["version"] == list(sys.version_info[:2])
    assert (
        here["packages"]["numpy"][0] == np.__version__ and "numpy" in here["packages"]["numpy"][1]
    )
    there = {"version": here["version"], "site": str(site), "packages": {}}
    for name, version in (("safetensors", "9.9"), ("numpy", "8.8"), ("tabulate", "1.0")):
        there["packages"][name] = [version, [name, f"{name}-{version}.dist-info"]]
    found = bisect.differing(here, there)
    assert [(name, new) for name, _, new in found] == [("numpy", "8.8"), ("safetensors", "9.9")]

    overlay = bisect.make_overlay(tmp_path / "overlay", there, "safetensors")
    code = f"""
import sys
{bisect.path_of(overlay, str(site))}
import numpy, only_there, safetensors
from importlib import metadata
print(safetensors.__version__, metadata.version("safetensors"), numpy.__version__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["9.9", "9.9", np.__version__]
