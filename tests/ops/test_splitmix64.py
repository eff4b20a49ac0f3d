"""The answer key: splitmix64 in torch, Python and NumPy integers against the golden file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from mask_oracle import splitmix64 as numpy_splitmix64

from xtrain import rng
from xtrain.ops.dropout.op import counter_key, mix_top_bits, shift_right, splitmix64

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "dropout_masks.json").read_text())
EDGES = [0, 1, -1, 2**31, 2**32, -(2**31), 2**63 - 1, -(2**63), 0x0123456789ABCDEF]


def unsigned(x: torch.Tensor) -> list[int]:
    return [v & rng.MASK64 for v in x.tolist()]


def test_known_answers():
    for row in GOLDEN["splitmix64"]:
        x, y = int(row["x"]), int(row["y"])
        assert unsigned(splitmix64(torch.tensor([rng.to_signed(x)]))) == [y]
        assert rng.splitmix64(x) == y
        assert int(numpy_splitmix64(np.array([x], np.uint64))[0]) == y


def test_equals_python_integers():
    x = torch.cat([torch.tensor(EDGES), torch.randint(-(2**63), 2**63 - 1, (1000,))])
    assert unsigned(splitmix64(x)) == [rng.splitmix64(v) for v in x.tolist()]


def test_mix_top_bits_leaves_only_the_low_bits_unfinished():
    x = torch.randint(-(2**63), 2**63 - 1, (1000,))
    assert torch.equal(shift_right(mix_top_bits(x), 33), shift_right(splitmix64(x), 33))


def test_shift_right_is_logical():
    x = torch.tensor(EDGES)
    for bits in (1, 27, 30, 31, 40, 63):
        assert unsigned(shift_right(x, bits)) == [(v & rng.MASK64) >> bits for v in EDGES]


def test_counter_key_wraps():
    seed, index = torch.tensor(-7), torch.tensor(EDGES)
    expected = [(-7 & rng.MASK64) ^ ((i * rng.GAMMA) & rng.MASK64) for i in EDGES]
    assert unsigned(counter_key(seed, index)) == expected
