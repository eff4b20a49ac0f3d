"""splitmix64 for Triton kernels: the device functions that every random kernel shares.

Counter and key layout: element i (64-bit, flat and logical, offset included) of a tensor draws from
the state key(i) = seed ^ (i * GAMMA) mod 2^64, the same as `xtrain.ops.splitmix64`; a kernel may
form i * GAMMA by additions. Nothing of the launch (block size, program, warp) enters.

The integer pipe is what dropout waits for, so that only the high word of the result is formed: it
holds the 24 bits that decide, and its last multiplication needs no low word.
"""

import triton
import triton.language as tl

from xtrain import rng

GAMMA = tl.constexpr(rng.GAMMA)
MUL1 = tl.constexpr(rng.MUL1)
MUL2_LOW = tl.constexpr(rng.MUL2 & 0xFFFFFFFF)
MUL2_HIGH = tl.constexpr(rng.MUL2 >> 32)


@triton.jit
def random_high_word(key):
    """Return a uint32 whose top 31 bits are those of splitmix64(key); key is uint64.

    The last xor-shift, by 31, is left out: it changes the lowest of the 32 bits alone.
    """
    z = key + GAMMA
    z = (z ^ (z >> 30)) * MUL1
    z = z ^ (z >> 27)
    low, high = z.to(tl.uint32), (z >> 32).to(tl.uint32)
    mul2_low = tl.full([], MUL2_LOW, tl.uint32)
    mul2_high = tl.full([], MUL2_HIGH, tl.uint32)
    return tl.umulhi(low, mul2_low) + low * mul2_high + high * mul2_low


@triton.jit
def counter(index, VEC: tl.constexpr):
    """Return index * GAMMA mod 2^64 of int32 indices, of which VEC neighbours share a thread.

    Taken apart by hand, so that the neighbours share one multiplication and add constants.
    """
    first = (index & -VEC).to(tl.uint64) * GAMMA
    return first + (index & (VEC - 1)).to(tl.uint64) * GAMMA


@triton.jit
def keeps(key, last_dropped):
    """Return whether the element of this key is kept: its 24 bits are >= the threshold.

    (h >> 40) >= t is (h >> 32) > (t << 8) - 1, for t from 1 to 2^24: the host hands that number
    in as last_dropped, which fits in 32 bits even where nothing is kept.
    """
    return random_high_word(key) > last_dropped.to(tl.uint32)


@triton.jit
def dropped_out(x, keep, scale):
    """Return fp32 x times scale where kept, else +0.

    The select comes before the product: behind it the compiler would sink it past the rounding to
    16 bits and take packed pairs apart. A dropped NaN is +0 all the same, since scale >= 0.
    """
    return tl.where(keep, x, 0.0) * scale
