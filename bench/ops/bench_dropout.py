"""xtrain.ops.dropout against F.dropout: inputs, providers, bytes. Run by bench/run_op.py.

Seeds are tensors, as in a compiled training step: a fresh one per call would be timed along.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.harness import Case
from xtrain.ops import dropout
from xtrain.ops.dropout import dropout_reference

QUESTION = "What does seeded dropout cost an element, against torch's own, eager and compiled?"
P = 0.1
BASELINE = "F.dropout"

# x [B * T, D]: the residual stream of the presets `small`, 124m and 1b, and an odd shape.
CASES = {
    "cpu": [
        Case("small stream", (2048, 256), torch.float32),
        Case("124m stream, 1 sample", (1024, 768), torch.float32),
        Case("124m stream, 1 sample", (1024, 768), torch.bfloat16),
        Case("odd", (1021, 257), torch.float32),
    ],
    "cuda": [
        Case("124m stream", (32768, 768), torch.bfloat16),
        Case("1b stream", (16384, 2048), torch.bfloat16),
        Case("8b stream", (32768, 4096), torch.bfloat16),
        Case("8b stream", (32768, 4096), torch.float32),
        Case("odd", (32749, 769), torch.bfloat16),
    ],
}


def make_inputs(case: Case, device: torch.device) -> tuple[Tensor, ...]:
    """x, the seed and the offset; only x takes a gradient."""
    x = torch.randn(case.shape, dtype=case.dtype, device=device, requires_grad=True)
    seed = torch.tensor(-7046029254386353131, device=device)
    offset = torch.zeros((), dtype=torch.int64, device=device)
    return x, seed, offset


def f_dropout(x: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
    return F.dropout(x, P, training=True)


def ours(x: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
    return dropout(x, P, seed, offset)


PROVIDERS = {
    "F.dropout": f_dropout,
    "xtrain": ours,
    "inductor, F.dropout": torch.compile(f_dropout, dynamic=False),
    "inductor, xtrain": torch.compile(ours, dynamic=False),
}


def num_bytes(case: Case, mode: str) -> int:
    """Return the least that must move: x in and out, or the gradient in and out; no mask."""
    tensor = case.numel * case.dtype.itemsize
    return {"forward": 2, "backward": 2, "both": 4}[mode] * tensor


def check(case: Case, provider: str, inputs: tuple[Tensor, ...], output: Tensor) -> str | None:
    """Return what is wrong with an output, None if nothing is."""
    if provider.endswith("F.dropout"):  # masks of its own: the rate is all that can be held to
        rate = (output == 0).double().mean().item()
        bound = 5 * (P * (1 - P) / case.numel) ** 0.5
        return None if abs(rate - P) <= bound else f"drops {rate:.4f} instead of {P}"
    x, seed, offset = inputs
    equal = torch.equal(output, dropout_reference(x, P, seed, offset))
    return None if equal else "differs from the reference"
