"""Conversions between bf16 and fp32 in pairs, as the registers hold them.

Left to the compiler each element of a pair is moved out, converted and moved back on its own: a
third of the instructions of a kernel that does little else. By hand a pair takes two instructions
to widen, and one to round. Other dtypes, and Triton's interpreter, take the plain cast.
"""

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def widened(x):
    """Return x in fp32."""
    if x.dtype == tl.bfloat16 and not INTERPRETED:
        x = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    return x.to(tl.float32)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """Return fp32 x rounded to DTYPE, as fp32."""
    if DTYPE == tl.bfloat16 and not INTERPRETED:
        x = tl.inline_asm_elementwise(
            """{
            .reg .b32 pair;
            cvt.rn.bf16x2.f32 pair, $3, $2;
            shl.b32 $0, pair, 16;
            and.b32 $1, pair, 0xffff0000;
            }""",
            "=r,=r,r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    elif DTYPE != tl.float32:
        x = x.to(DTYPE).to(tl.float32)
    return x
