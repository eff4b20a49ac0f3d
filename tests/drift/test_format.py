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
from torch import nn

from xtrain.drift import DriftError, Record, compare, record
from xtrain.drift.recording import record_format, writing
from xtrain.drift.recording.forwards import record_prompts
from xtrain.drift.recording.record_format import Columns, column
from xtrain.drift.settings import Run, check_flag
from xtrain.settings import fits, flags, option

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
        with pytest.raises(DriftError, match=f"--humidity must be {message}, got"):
            check_flag(flag, value)
    with pytest.raises(DriftError, match="humidity must be at most 100, got 101"):
        Wet(humidity=101)
    [item] = [item for item in Wet.__dataclass_fields__.values() if item.name == "humidity"]
    allowed = fits(Wet, item)
    assert [allowed(value) for value in (5, -1, "5", 5.0, True)] == [True, *[False] * 4]
    kept = [record_prompts(subject(Rowwise()), prompts([1]), Wet(humidity=n)) for n in (5, 6)]
    assert [found.run["humidity"] for found in kept] == [5, 6]
    assert compare(*kept).changes == [("run.humidity", 5, 6)]
