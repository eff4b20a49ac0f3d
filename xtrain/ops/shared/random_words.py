"""splitmix64 for Triton kernels: the device functions that every random kernel shares.

Counter and key layout: element i (64-bit, flat and logical, offset included) of a tensor draws from
the state key(i) = seed ^ (i * GAMMA) mod 2^64, the same as in dropout/op.py; a kernel may form
i * GAMMA by additions. Nothing of the launch (block size, program, warp) enters.

Cost: integer arithmetic is what dropout waits for, and of it the pipe that does all but
multiplications. So only the high word of the result is formed, which holds the 24 bits that decide
and whose last multiplication needs no low word; neighbours share one multiplication by GAMMA; and
the upper halves of 64-bit additions are written as multiplications by a 1 that the assembler cannot
see through. Of the 20 instructions an element then 8 multiply (dropout/kernel.py counts them all).
"""

import triton
import triton.language as tl

from xtrain import rng
from xtrain.ops.shared.casts import INTERPRETED

GAMMA = tl.constexpr(rng.GAMMA)
MUL1 = tl.constexpr(rng.MUL1)
MUL2 = tl.constexpr(rng.MUL2)

# z = (seed ^ (first + lane)) + GAMMA;  z = (z ^ z >> 30) * MUL1;  ((z ^ z >> 27) * MUL2) >> 32,
# on 32-bit halves. $0 result, $1 first, $2 lane, $3 seed, $4 the number 1.
HIGH_WORD = tl.constexpr(
    f"""{{
    .reg .u32 low, high, other_low, other_high, mixed_low, mixed_high;
    .reg .u64 product;
    mov.b64 {{low, high}}, $1;
    mov.b64 {{other_low, other_high}}, $2;
    add.cc.u32 low, low, other_low;
    madc.lo.u32 high, high, $4, other_high;
    mov.b64 {{other_low, other_high}}, $3;
    xor.b32 low, low, other_low;
    xor.b32 high, high, other_high;
    add.cc.u32 low, low, {rng.GAMMA & 0xFFFFFFFF:#x};
    madc.lo.u32 high, high, $4, {rng.GAMMA >> 32:#x};
    shf.r.clamp.b32 other_low, low, high, 30;
    shr.u32 other_high, high, 30;
    xor.b32 mixed_low, low, other_low;
    xor.b32 mixed_high, high, other_high;
    mul.wide.u32 product, mixed_low, {rng.MUL1 & 0xFFFFFFFF:#x};
    mov.b64 {{low, high}}, product;
    mad.lo.u32 high, mixed_low, {rng.MUL1 >> 32:#x}, high;
    mad.lo.u32 high, mixed_high, {rng.MUL1 & 0xFFFFFFFF:#x}, high;
    shf.r.clamp.b32 other_low, low, high, 27;
    shr.u32 other_high, high, 27;
    xor.b32 mixed_low, low, other_low;
    xor.b32 mixed_high, high, other_high;
    mul.hi.u32 high, mixed_low, {rng.MUL2 & 0xFFFFFFFF:#x};
    mad.lo.u32 high, mixed_low, {rng.MUL2 >> 32:#x}, high;
    mad.lo.u32 $0, mixed_high, {rng.MUL2 & 0xFFFFFFFF:#x}, high;
    }}"""
)


@triton.jit
def random_high_word(first, lane, seed):
    """Return a uint32 whose top 31 bits are those of splitmix64(seed ^ (first + lane)).

    The last xor-shift, by 31, is left out: it changes the lowest of the 32 bits alone. All three
    arguments are uint64; first and lane are multiples of GAMMA, lane a constant of the thread.
    """
    if INTERPRETED:
        z = (seed ^ (first + lane)) + GAMMA
        z = (z ^ (z >> 30)) * MUL1
        return (((z ^ (z >> 27)) * MUL2) >> 32).to(tl.uint32)
    one = tl.num_programs(2).to(tl.uint32)  # launches are one-dimensional
    return tl.inline_asm_elementwise(
        HIGH_WORD,
        "=r,l,l,l,r",
        [first, lane, seed, one],
        dtype=tl.uint32,
        is_pure=True,
        pack=1,
    )


# $1 where the random word $2 is above $3, else 0. Behind a branch, since the assembler makes of it
# a predicated move, which the multiply pipe runs; of a select it would not.
ZERO_DROPPED = tl.constexpr(
    """{
    .reg .pred keep;
    .reg .b32 value;
    setp.gt.u32 keep, $2, $3;
    mov.b32 value, $1;
    @keep bra DONE;
    mov.b32 value, 0;
DONE:
    mov.b32 $0, value;
    }"""
)


@triton.jit
def random_words(seed, start, index, VEC: tl.constexpr):
    """Return the high words of the elements start / GAMMA + index.

    index is int32, and a thread holds VEC neighbours of it: taken apart by hand, since they share
    a multiplication only so.
    """
    first = start + (index & -VEC).to(tl.uint64) * GAMMA
    lane = (index & (VEC - 1)).to(tl.uint64) * GAMMA
    return random_high_word(first, lane, seed)


@triton.jit
def dropped_out(x, word, last_dropped, scale):
    """Return fp32 x times scale where word keeps it, else +0.

    An element is kept if its 24 bits are at least the threshold: (h >> 40) >= t is
    (h >> 32) > (t << 8) - 1, for t from 1 to 2^24, and the host hands that number in as
    last_dropped, which fits in 32 bits even where nothing is kept. The select comes before the
    product: behind it the compiler would sink it past the rounding to 16 bits and take packed pairs
    apart. A dropped NaN is +0 all the same, since scale >= 0.
    """
    last_dropped = last_dropped.to(tl.uint32)
    if INTERPRETED:
        x = tl.where(word > last_dropped, x, 0.0)
    else:
        x = tl.inline_asm_elementwise(
            ZERO_DROPPED,
            "=r,r,r,r",
            [x, word, last_dropped],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return x * scale
