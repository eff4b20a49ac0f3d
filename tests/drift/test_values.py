"""Hashes, statistics, distances and files against torch, NumPy and the safetensors package."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from xtrain.drift.comparison.differences import distance
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
from xtrain.drift.settings import DriftError

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
