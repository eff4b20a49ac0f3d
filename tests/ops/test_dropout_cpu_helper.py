"""The compiled helper behind eager dropout on the CPU: speed, fallback, building it safely."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from mask_oracle import keep_mask

from xtrain.ops import dropout
from xtrain.ops.shared import cpu

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def fresh_helper():
    """Forget the loaded helper before and after."""
    cpu._dropout_helper.cache_clear()
    yield
    cpu._dropout_helper.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_at_most_twice_the_time_of_torch_dropout(dtype):
    x = torch.randn(2**22).to(dtype)
    seed, offset = torch.tensor(1), torch.tensor(0)
    ours, torchs = [], []
    for _ in range(9):
        start = time.perf_counter()
        dropout(x, 0.1, seed, offset)
        middle = time.perf_counter()
        F.dropout(x, 0.1, training=True)
        ours.append(middle - start)
        torchs.append(time.perf_counter() - middle)
    ratio = statistics.median(ours[2:]) / statistics.median(torchs[2:])
    assert ratio <= 2.0, f"{ratio:.2f} x F.dropout"


def test_threads_do_not_enter():
    x = torch.ones(300_007)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert ((dropout(x, 0.5, 9) != 0).numpy() == keep_mask(x.numel(), 0.5, 9)).all()
    finally:
        torch.set_num_threads(before)


def test_without_compiler_one_warning_and_the_same_masks(fresh_helper, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    x = torch.randn(5, 7).t()
    with pytest.warns(RuntimeWarning, match="no C.. compiler found .looked for no-such-compiler"):
        out = dropout(x, 0.4, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert torch.equal(dropout(x, 0.4, 3), out)
    assert ((out != 0).numpy() == keep_mask((7, 5), 0.4, 3)).all()
    assert out.is_contiguous()


def test_failing_compiler_is_quoted(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "broken.cpp"
    source.write_text("this is no C++;\n")
    with pytest.raises(RuntimeError, match=r"(?s)broken\.cpp failed:.*this.*is no C\+\+|error"):
        cpu.load_library(source)
    assert not list((tmp_path / "xtrain").iterdir()), "a failed build left something behind"


def test_processes_that_build_at_once(tmp_path):
    """Three processes find the cache empty and build the same library: all load a whole one."""
    source = tmp_path / "seven.cpp"
    source.write_text('extern "C" int seven() { return 7; }\n')
    code = (
        "import runpy, sys, pathlib\n"
        f"build = runpy.run_path({str(Path(cpu.__file__))!r})\n"
        f"print(build['load_library'](pathlib.Path({str(source)!r})).seven())\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    assert [p.communicate(timeout=120)[0].strip() for p in processes] == [b"7"] * 3
    assert [p.suffix for p in (tmp_path / "xtrain").iterdir()] == [".so"]


def test_name_depends_on_source_and_flags(monkeypatch, tmp_path):
    source = tmp_path / "a.cpp"
    source.write_text("int a;\n")
    compiler = cpu.find_compiler()
    first = cpu._fingerprint(source, compiler)
    source.write_text("int b;\n")
    second = cpu._fingerprint(source, compiler)
    monkeypatch.setattr(cpu, "FLAGS", (*cpu.FLAGS, "-g"))
    assert len({first, second, cpu._fingerprint(source, compiler)}) == 3


def test_compiler_command_may_hold_arguments(monkeypatch):
    (compiler,) = cpu.find_compiler()
    monkeypatch.setenv("CXX", f"env LC_ALL=C {compiler}")
    assert cpu.find_compiler()[1:] == ["LC_ALL=C", compiler]
    assert len(cpu._fingerprint(Path(cpu.__file__), cpu.find_compiler())) == 16


def test_foreign_cache_folder_is_not_trusted(monkeypatch, tmp_path):
    (tmp_path / "xtrain").mkdir()
    (tmp_path / "xtrain").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cpu.cache_folder() != tmp_path / "xtrain"


def test_importing_the_ops_loads_no_compiler():
    """Inductor, Dynamo and Triton cost seconds: only what `import torch` loads is loaded."""
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import xtrain.ops\n"
        "heavy = ('torch._inductor', 'torch._dynamo', 'triton', 'sympy')\n"
        "print(*[m for m in set(sys.modules) - before if m.startswith(heavy)])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []
