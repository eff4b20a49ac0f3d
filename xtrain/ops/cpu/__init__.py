"""Compiled helpers for eager ops on the CPU, with torch operations to fall back on.

Eager torch needs a dozen passes over memory for one splitmix64; the helper needs one.
"""

from __future__ import annotations

import ctypes
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xtrain.ops.cpu.build import load_library

_DTYPE_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


def dropout(x: Tensor, threshold: int, scale: float, seed: Tensor, offset: Tensor) -> Tensor | None:
    """Return dropout of x, or None when there is no helper (said once) or it lacks the dtype.

    Args:     threshold: keep where the element's 24 random bits are >= threshold, in [0, 2^24].
              scale: what kept elements are multiplied by.
              seed, offset: 0-d int64 on the CPU.
    """
    helper = _dropout_helper()
    code = _DTYPE_CODES.get(x.dtype)
    if helper is None or code is None:
        return None
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)  # empty_like would keep odd strides
    helper(
        out.data_ptr(),
        x.data_ptr(),
        x.numel(),
        code,
        seed.data_ptr(),
        offset.data_ptr(),
        threshold,
        scale,
        torch.get_num_threads(),
    )
    return out


@cache
def _dropout_helper() -> Any:
    try:
        library = load_library(Path(__file__).with_name("dropout.cpp"))
    except RuntimeError as error:
        warnings.warn(
            f"xtrain: {error}. Eager dropout on the CPU falls back on torch integer operations: "
            "the same masks, several times slower. Install g++ or clang++, or name one in CXX.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    helper = library.xtrain_dropout
    helper.restype = ctypes.c_int
    helper.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int32,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_double,
        ctypes.c_int64,
    ]
    return helper
