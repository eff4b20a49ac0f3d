"""splitmix64 in plain PyTorch int64 arithmetic: the answer key for every random kernel.

    key(i) = seed ^ (i * GAMMA)                       mod 2^64
    z = key + GAMMA;  z = (z ^ z >> 30) * MUL1;  z = (z ^ z >> 27) * MUL2;  h = z ^ z >> 31

int64 tensors hold the 64 bits: addition and multiplication wrap mod 2^64 whatever the sign, and a
logical right shift is an arithmetic one followed by a mask that clears the copies of the sign bit.

Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators".
"""

from __future__ import annotations

from torch import Tensor

from xtrain.rng import GAMMA, MUL1, MUL2, to_signed

GAMMA_INT64 = to_signed(GAMMA)
MUL1_INT64 = to_signed(MUL1)
MUL2_INT64 = to_signed(MUL2)


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Return the logical right shift of an int64 tensor's 64 bits by 1 to 63 places."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix_top_bits(key: Tensor) -> Tensor:
    """Return splitmix64(key) but for its last step, z ^ z >> 31: the top 31 bits are right."""
    z = key + GAMMA_INT64
    z = (z ^ shift_right(z, 30)) * MUL1_INT64
    return (z ^ shift_right(z, 27)) * MUL2_INT64


def splitmix64(key: Tensor) -> Tensor:
    """Return the published SplitMix64 output for each state in an int64 tensor.

    Shapes:   key (...), int64, the bits of an unsigned state; result alike.
    Source:   Steele, Lea, Flood 2014.
    """
    z = mix_top_bits(key)
    return z ^ shift_right(z, 31)


def counter_key(seed: Tensor, index: Tensor) -> Tensor:
    """Return seed ^ (index * GAMMA) mod 2^64: the state element `index` draws its bits from."""
    return seed ^ (index * GAMMA_INT64)
