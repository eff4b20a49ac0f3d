"""splitmix64 for Triton kernels: the device function that every random kernel shares.

Counter and key layout: element i (64-bit, flat and logical, offset included) of a tensor draws from
the state key(i) = seed ^ (i * GAMMA) mod 2^64, the same as `xtrain.ops.splitmix64`; a kernel may
form i * GAMMA by additions. Nothing of the launch (block size, program, warp) enters.
"""

import triton
import triton.language as tl

from xtrain import rng

GAMMA = tl.constexpr(rng.GAMMA)
MUL1 = tl.constexpr(rng.MUL1)
MUL2 = tl.constexpr(rng.MUL2)


@triton.jit
def random_bits24(key):
    """Return the top 24 bits of splitmix64(key) as uint32; key is uint64.

    The last xor-shift by 31 is left out: it cannot change these bits.
    """
    z = key + GAMMA
    z = (z ^ (z >> 30)) * MUL1
    z = (z ^ (z >> 27)) * MUL2
    return (z >> 40).to(tl.uint32)
