"""The record format: version 1 as it was, and what it takes to add a column or a setting."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import xxhash
from drift_models import Rowwise, prompts, subject, tokens
from forge import edited, redo_manifest, write_tensors
from safetensors.torch import load_file, save_file
from torch import nn

from xtrain.drift import DriftError, Record, compare, record
from xtrain.drift.comparison.differences import distance
from xtrain.drift.recording import record_format, writing
from xtrain.drift.recording.forwards import record_prompts
from xtrain.drift.recording.record_format import Columns, column
from xtrain.drift.recording.tensors import (
    DTYPES,
    OF_TORCH,
    TensorFile,
    TensorWriter,
    fingerprint,
    narrow,
    to_float64,
)
from xtrain.drift.recording.writing import to_bits
from xtrain.drift.settings import Run
from xtrain.settings import ConfigError, fits, flags, option

WEIGHT = np.arange(12, dtype=np.float32).reshape(4, 3) / 7
IDS = [[2, 0]]


def version_1(folder, weight=WEIGHT):
    """Write by hand what xtrain.drift wrote before it kept operands and small results whole."""
    logits = weight[IDS[0]]

    def mark(array):
        return np.frombuffer(xxhash.xxh3_128_digest(array.tobytes()), np.uint8)

    def samples(array):
        kept = array.ravel().astype(np.float64)
        return np.concatenate([kept, np.full(16 - kept.size, np.nan)])

    def shape(array):
        return np.array([*array.shape, *[-1] * (8 - array.ndim)], np.int64)

    result = logits[None]
    wide = result.astype(np.float64)
    statistics = [wide.min(), wide.max(), wide.mean(), np.sqrt((wide * wide).mean()), 0.0, 0.0]
    columns = {
        "hash": mark(result),
        "whole": mark(result),
        "shape": shape(result),
        "whole_shape": shape(result),
        "statistics": np.array(statistics),
        "samples": samples(result),
    }
    arrays = {f"step_0000/ops/{name}": row[None] for name, row in columns.items()}
    arrays |= {f"step_0000/blocks/{name}": row[None][:0] for name, row in columns.items()}
    arrays["step_0000/logits"] = logits
    names = {np.dtype(np.uint8): "U8", np.dtype(np.int64): "I64", np.dtype(np.float64): "F64"}
    header, data = {}, b""
    for name, array in arrays.items():
        start, data = len(data), data + array.tobytes()
        header[name] = {
            "dtype": names.get(array.dtype, "F32"),
            "shape": list(array.shape),
            "data_offsets": [start, len(data)],
        }
    order = np.argsort(-logits, axis=1)
    top = np.take_along_axis(logits, order, axis=1).astype(np.float64)
    case = {
        "length": 2,
        "tokens": order[:, 0].tolist(),
        "margin": (top[:, 0] - top[:, 1]).tolist(),
        "top_ids": order.tolist(),
        "top_logits": top.tolist(),
        "ops_table": 0,
        "blocks_table": 1,
    }
    contents = {
        "format": "xtrain.drift",
        "version": 1,
        "environment": {"torch.version": "1.0", "cpu.flags": ["avx"]},
        "model": {
            "kind": "library",
            "name": "Embedding",
            "blocks": [],
            "weights": [
                {
                    "name": "weight",
                    "shape": [4, 3],
                    "dtype": "F32",
                    "xxh3_128": mark(weight).tobytes().hex(),
                    "samples": [str(x) if np.isnan(x) else x for x in samples(weight).tolist()],
                }
            ],
        },
        "run": {
            "mode": "eager",
            "dtype": "auto",
            "device": "cpu",
            "batch_size": 1,
            "pad_to": None,
            "decode": None,
            "num_tokens": 16,
            "temperature": 1.0,
            "sample_seed": 0,
            "top_k": 8,
            "tensors": False,
            "op_steps": None,
            "warm_up": 0,
        },
        "observer_effect": None,
        "prompts": [{"tokens": IDS[0], "text": None}],
        "tables": [[["", "aten.embedding", "F32"]], []],
    }
    folder.mkdir()
    (folder / "record.json").write_text(json.dumps(contents))
    (folder / "case_0000.json").write_text(json.dumps({"text": None, "steps": [case]}))
    write_tensors(folder / "case_0000.safetensors", header, data)
    redo_manifest(folder)
    return folder


def embedding(weight=WEIGHT):
    return nn.Embedding.from_pretrained(torch.from_numpy(weight), freeze=False)


def test_a_record_of_version_1_is_read_and_compared(tmp_path):
    old = Record(version_1(tmp_path / "old"))
    [step] = old.steps()
    assert step.keys() == (("", "aten.embedding", "F32"),) and step.keys("blocks") == ()
    assert step.formulas() is None and step.small == {} and step.value(0) is None
    np.testing.assert_array_equal(step.logits_float64(), WEIGHT[IDS[0]])
    np.testing.assert_array_equal(step.columns().samples[0, :6], WEIGHT[IDS[0]].ravel())
    assert compare(old, old).exit_code == 0
    new = record(embedding(), torch.tensor(IDS))
    assert new.contents["version"] == 2
    for pair in ((old, new), (new, old)):
        found = compare(*pair)
        assert found.exit_code == 0 and found.num_matched == 1 and not found.unmatched
        assert "torch.version" in [change.name for change in found.changes]
    changed = WEIGHT.copy()
    changed[2, 1] += 0.5
    found = compare(old, record(embedding(changed), torch.tensor(IDS)))
    assert found.exit_code == 4 and found.reason == "other weights: weight"
    assert tuple(found.first_divergence) == ("", "aten.embedding")
    assert found.first_divergence.distance.max_abs == 0.5  # 6 numbers: all are samples


def test_version_1_has_its_forgeries_refused_too(tmp_path):
    source = version_1(tmp_path / "old")

    def edit(values):
        del values["run"]["warm_up"]

    forged = edited(source, tmp_path / "new", "record.json", edit)
    with pytest.raises(DriftError, match=r"record\.json is damaged: run\.warm_up is missing"):
        Record(forged)


@dataclass(frozen=True, eq=False)
class Wider(Columns):
    """One column more, by one field."""

    largest: np.ndarray = column("F64", 1, lambda r: [np.abs(r.bits).max()], later=True)


def test_a_column_is_one_field(tmp_path, monkeypatch):
    record(Rowwise(), tokens(), out=tmp_path / "before", tensors=True)
    for module in (record_format, writing):
        monkeypatch.setattr(module, "Columns", Wider)
    record(Rowwise(), tokens(), out=tmp_path / "after", tensors=True)
    [step] = Record(tmp_path / "after").steps()
    expected = [[np.abs(step.value(i)[0]).max()] for i in range(len(step.keys()))]
    np.testing.assert_array_equal(step.columns().largest, expected)
    assert len(step.columns("blocks").largest) == 2
    [old] = Record(tmp_path / "before").steps()
    assert old.columns().largest is None  # a record from before it
    assert compare(tmp_path / "before", tmp_path / "after").exit_code == 0


@dataclass(frozen=True, kw_only=True)
class Wet(Run):
    """One setting more, by one field."""

    humidity: int = option(3, "of the room", unit="%", at_least=0, at_most=100, factor=True)


def test_a_setting_is_one_field():
    flag = flags(Wet)["humidity"]
    parser = argparse.ArgumentParser()
    flag.add_to(parser.add_argument)
    assert "of the room [3]" in parser.format_help()
    assert flag.value(parser.parse_args([])) == 3
    args = parser.parse_args(["--humidity=0"])
    assert flag.value(args) == 0 and flag.shown(args) == "--humidity 0"
    for value, message in (("101", "at most 100"), (-1, "at least 0"), ("x", "a whole number")):
        with pytest.raises(ConfigError, match=f"--humidity must be {message}, got"):
            flag.check(value)
    with pytest.raises(DriftError, match="humidity must be at most 100, got 101"):
        Wet(humidity=101)
    [item] = [item for item in Wet.__dataclass_fields__.values() if item.name == "humidity"]
    allowed = fits(Wet, item)
    assert [allowed(value) for value in (5, -1, "5", 5.0, True)] == [True, *[False] * 4]
    kept = [record_prompts(subject(Rowwise()), prompts([1]), Wet(humidity=n)) for n in (5, 6)]
    assert [found.run["humidity"] for found in kept] == [5, 6]
    assert compare(*kept).changes == [("run.humidity", 5, 6)]


# --- hashes, statistics, distances and files against torch, NumPy and the safetensors package -----


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def mark(tensor):
    return fingerprint(*to_bits(tensor))


@pytest.mark.parametrize("dtype", [*FLOATS, *FP8], ids=str)
def test_every_float_is_widened_exactly(dtype):
    size = torch.empty((), dtype=dtype).element_size()
    codes = torch.arange(256, dtype=torch.uint8)
    if size > 1:  # spread over all exponents
        codes = torch.arange(65536, dtype=torch.int64).to(torch.int16)
        codes = torch.stack([torch.full_like(codes, 77)] * (size // 2 - 1) + [codes], -1)
    tensor = codes.contiguous().view(dtype).flatten()
    bits, name = to_bits(tensor)
    np.testing.assert_array_equal(to_float64(bits, name), tensor.double().numpy())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_to_a_narrow_dtype_is_torchs(dtype):
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(10_000, generator=generator)
    ties = (1 + torch.arange(64) / 64) * (1 + 2.0**-9)
    values = torch.cat([exact, ties, exact * 1e-6, torch.tensor([0.0, -0.0, 1e30])])
    name = OF_TORCH[str(dtype).removeprefix("torch.")]
    np.testing.assert_array_equal(narrow(values.numpy(), name), values.to(dtype).double().numpy())


def test_the_hash_is_of_logical_bits():
    x = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    assert mark(x).hash == mark(x.t().contiguous().t()).hash  # layout in memory is no number
    assert mark(x).hash != mark(x.t()).hash
    changed = x.clone()
    changed[3, 5] = torch.nextafter(changed[3, 5], torch.tensor(99.0))
    assert mark(x).hash != mark(changed).hash
    assert mark(torch.tensor([0.0])).hash != mark(torch.tensor([-0.0])).hash


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_nan_is_the_same_and_its_place_counts(dtype):
    nan = torch.tensor([1.0, torch.nan, 3.0], dtype=dtype)
    other = nan.clone()
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[nan.element_size()]
    other.view(integers)[1] |= -1 << (8 * nan.element_size() - 1)  # the sign
    other.view(integers)[1] |= 1  # and a payload
    assert torch.isnan(other[1]) and not torch.equal(nan.view(integers), other.view(integers))
    assert mark(nan).hash == mark(other).hash
    assert mark(nan).hash != mark(nan[[1, 0, 2]]).hash
    found = dict(
        zip(("min", "max", "mean", "rms", "nan", "inf"), mark(nan).statistics, strict=True)
    )
    assert found == {"min": 1, "max": 3, "mean": 2, "rms": 5**0.5, "nan": 1, "inf": 0}


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.bool], ids=str)
def test_statistics_are_those_of_fp64(dtype):
    values = torch.arange(-1000, 200_001).remainder(997).sub(300).to(dtype)
    exact = values.double()
    expected = [exact.min(), exact.max(), exact.mean(), exact.square().mean().sqrt(), 0, 0]
    np.testing.assert_allclose(mark(values).statistics, expected, rtol=1e-13, atol=1e-13)
    assert np.isnan(mark(torch.empty(0)).statistics[:4]).all()
    strange = mark(torch.tensor([torch.inf, -torch.inf, torch.nan, 2.0])).statistics
    assert strange.tolist() == [2, 2, 2, 2, 1, 2]


def test_samples_are_first_last_and_between():
    found = mark(torch.arange(1000, dtype=torch.float32)).samples
    assert found[0] == 0 and found[-1] == 999 and (np.diff(found) > 60).all()
    few = mark(torch.tensor([4.0, 5.0])).samples
    assert few[:2].tolist() == [4, 5] and np.isnan(few[2:]).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_ulp_is_one_ulp(dtype):
    for value in (1.0, -1.5, 1024.0, 3e-5):
        x = torch.tensor([value], dtype=dtype)
        integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[x.element_size()]
        y = (x.view(integers) + 1).view(dtype)
        found = distance(*to_bits(x), *to_bits(y))
        assert found.max_ulps == 1 and found.num_different == 1 and found.exact
        assert found.max_abs == float((y.double() - x.double()).abs())


def test_distance_between_two_dtypes_and_with_nan():
    x = torch.tensor([1.0, 2.0, torch.nan, torch.inf])
    assert distance(*to_bits(x), *to_bits(x.bfloat16())).num_different == 0
    y = torch.tensor([1.0 + 2.0**-9, 2.0, torch.nan, torch.inf])
    found = distance(*to_bits(y), *to_bits(x.bfloat16()))
    assert (found.max_abs, found.max_ulps) == (2.0**-9, 0.25)  # of bf16's last place, 2^-7
    z = torch.tensor([1.0, torch.nan, torch.nan, torch.inf])
    assert distance(*to_bits(x), *to_bits(z)).max_abs == np.inf


def everything():
    values = torch.arange(12).reshape(3, 4)
    found = {name: values.to(getattr(torch, name)) for _, name in DTYPES.values()}
    return {**found, "scalar": torch.tensor(1.5), "none": torch.empty(0, 3)}


def test_files_are_those_of_the_safetensors_package(tmp_path):
    tensors = everything()
    writer = TensorWriter(tmp_path / "ours.safetensors")
    for name, tensor in tensors.items():
        writer.add(name, *to_bits(tensor))
    writer.close()
    loaded = load_file(tmp_path / "ours.safetensors")
    save_file(tensors, tmp_path / "theirs.safetensors")
    theirs = TensorFile(tmp_path / "theirs.safetensors")
    assert set(loaded) == set(theirs) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert to_bits(loaded[name])[0].tobytes() == to_bits(tensor)[0].tobytes()
        assert theirs.dtype(name) == to_bits(tensor)[1]
        np.testing.assert_array_equal(theirs[name], to_bits(tensor)[0])
    assert [path.name for path in tmp_path.iterdir()].count(".ours.safetensors.data") == 0


def test_files_that_are_none(tmp_path):
    path = tmp_path / "x.safetensors"
    writer = TensorWriter(path)
    writer.add("a", np.arange(8, dtype=np.float32), "F32")
    writer.close()
    whole = path.read_bytes()
    wrong_shape = whole.replace(b'"shape":[8]', b'"shape":[9]')
    wrong_end = whole.replace(b"[0,32]", b"[0,64]")
    for bad in (b"", whole[:5], whole[:20], whole[:-1], wrong_shape, wrong_end, b"\xff" * 40):
        path.write_bytes(bad)
        with pytest.raises(DriftError, match="x.safetensors is no whole safetensors file"):
            TensorFile(path)
    with pytest.raises(DriftError, match="No such file"):
        TensorFile(tmp_path / "missing")
