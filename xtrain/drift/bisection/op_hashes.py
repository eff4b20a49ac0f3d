"""The child of `ops`: each op alone on fixed inputs, row lengths 1 to 64 and a few large ones."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xtrain.drift.recording.tensors import hash_bits, same_nan
from xtrain.drift.recording.writing import to_bits

LENGTHS = (*range(1, 65), 127, 128, 256, 768, 1000, 4096)


def draw(*shape: int) -> Tensor:
    """Return numbers in [-2, 2), the same everywhere: multiples of 2^-22 made of integers."""
    raw = np.random.PCG64(list(shape)).random_raw(int(np.prod(shape)))
    values = (raw >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-22) - np.float32(2)
    return torch.from_numpy(values.reshape(shape))


def _attention(x: Tensor, causal: bool) -> Tensor:
    """Rows are heads of size 16 over x.shape[-1] keys."""
    length = x.shape[-1]
    q, k, v = (draw(1, 2, length, 16 + i)[..., :16].to(x.dtype) for i in range(3))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _one_query(x: Tensor) -> Tensor:
    """One query of 2 heads over x.shape[-1] keys: a step of decoding, where threads share keys."""
    length = x.shape[-1]
    q, k, v = (draw(1, 2, n, 32 + i)[..., :32].to(x) for i, n in enumerate((1, length, length)))
    return F.scaled_dot_product_attention(q, k, v)


OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda x: x + x.flip(-1),
    "mul": lambda x: x * x.flip(-1),
    "div": lambda x: x / (x.flip(-1) + 3),
    "sum": lambda x: x.sum(-1),
    "sum_all": lambda x: x.sum(),
    "mean": lambda x: x.mean(-1),
    "var": lambda x: x.var(-1, correction=0),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "cumsum": lambda x: x.cumsum(-1),
    "exp": torch.exp,
    "log": lambda x: torch.log(x + 3),
    "sin": torch.sin,
    "cos": torch.cos,
    "pow": lambda x: (x + 3).pow(2.5),
    "rsqrt": lambda x: (x * x + 1).rsqrt(),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-6),
    "mm": lambda x: x @ draw(x.shape[-1], 48).to(x.dtype),
    "mv": lambda x: x @ draw(x.shape[-1]).to(x.dtype),
    "linear": lambda x: F.linear(x, draw(48, x.shape[-1]).to(x.dtype), draw(48).to(x.dtype)),
    "bmm": lambda x: x[None] @ draw(1, x.shape[-1], 8).to(x.dtype),
    "sdpa": lambda x: _attention(x, False),
    "sdpa_causal": lambda x: _attention(x, True),
    "sdpa_one_query": _one_query,
    "cross_entropy": lambda x: F.cross_entropy(
        x, torch.arange(len(x), device=x.device) % x.shape[-1], reduction="none"
    ),
}


def hashes(rows: int, dtype: torch.dtype, device: str) -> dict[str, list[str]]:
    """Return op -> hash of its result per length of LENGTHS; "" where it cannot run."""
    inputs = [draw(rows, length).to(device, dtype) for length in LENGTHS]
    found = {}
    with torch.no_grad():
        for name, op in OPS.items():
            found[name] = [_hash(op, x) for x in inputs]
    return found


def _hash(op: Callable[[Tensor], Tensor], x: Tensor) -> str:
    try:
        bits, dtype = to_bits(op(x))
    except (RuntimeError, NotImplementedError):
        return ""  # not implemented for this dtype or device
    return hash_bits(same_nan(bits.reshape(-1), dtype)).hex()[:16]


def run(rows: int, dtype: torch.dtype, device: str, threads: int | None) -> str:
    """Return the hashes as JSON."""
    if threads is not None:
        torch.set_num_threads(threads)
    return json.dumps({"lengths": LENGTHS, "hashes": hashes(rows, dtype, device)})
