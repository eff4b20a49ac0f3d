"""xtrain.ops.dropout against F.dropout: inputs, providers, bytes.

Seeds are tensors, as in a compiled training step: a fresh one per call would be timed along.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.ops.common import (
    COPY,
    EAGER,
    INDUCTOR,
    OUR_ERROR_FACTOR,
    OURS,
    SEE_THROUGH,
    Case,
    Inputs,
    Provider,
    Target,
    compiled_provider,
    decomposed,
    keep_rate_problem,
    our_op,
    truth_by,
)
from xtrain.ops.dropout.op import dropout_mask, dropout_reference

OP = "dropout"
QUESTION = "What does seeded dropout cost an element, against torch's own, eager and compiled?"
P = 0.1
SEED = -7046029254386353131
MODES = ("forward", "both")

# x [B * T, D]: the residual streams of 8b- and 124m-like models; on a CPU those of small presets.
CASES = {
    "cuda": [
        Case("8b stream", (32768, 4096), torch.bfloat16),
        Case("124m stream", (32768, 768), torch.bfloat16),
    ],
    "cpu": [
        Case("odd", (1021, 257), torch.float32),
        Case("small stream", (2048, 256), torch.float32),
        Case("124m stream, 1 sample", (1024, 768), torch.float32),
        Case("124m stream, 1 sample", (1024, 768), torch.bfloat16),
    ],
}


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """x, the seed and the offset; only x takes a gradient."""
    x, grad = (torch.randn(case.shape, dtype=case.dtype, device=device) for _ in range(2))
    seed = torch.tensor(SEED, device=device)
    offset = torch.zeros((), dtype=torch.int64, device=device)
    return Inputs((x.requires_grad_(), seed, offset), (grad,))


def torchs_own(case: Case) -> Callable[..., Tensor]:
    return lambda x, seed, offset: F.dropout(x, P, training=True)


def seen_through(case: Case) -> Callable[..., Tensor]:
    forward = our_op(OP).forward
    return lambda x, seed, offset: forward(x, P, seed, offset)


def ours(case: Case) -> Callable[..., Tensor]:
    public = our_op(OP).public
    return lambda x, seed, offset: public(x, P, seed, offset)


def plain(case: Case) -> Callable[..., Tensor]:
    """The same mask by torch's own select, in x's dtype."""

    def function(x: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        keep = dropout_mask(x.shape, P, seed, offset)
        return torch.where(keep, x * (1 / (1 - P)), 0.0)

    return function


PROVIDERS = {
    EAGER: Provider(torchs_own, own_mask=True),
    INDUCTOR: compiled_provider(torchs_own, own_mask=True),
    SEE_THROUGH: compiled_provider(seen_through, error_factor=OUR_ERROR_FACTOR),
    OURS: Provider(ours, error_factor=OUR_ERROR_FACTOR),
}
TARGETS = [
    Target("at least 85% of copy's bandwidth", 1 / 0.85, COPY, mode="forward", cases=("8b stream",))
]


def num_bytes(case: Case, mode: str) -> int:
    """x in and out, then the gradient in and out; no mask."""
    return {"forward": 2, "both": 4}[mode] * case.numel * case.dtype.itemsize


def num_flops(case: Case, mode: str) -> None:
    return None


def truth(case: Case, inputs: Inputs) -> list[Tensor]:
    return truth_by(lambda x, seed, offset: dropout_reference(x, P, seed, offset), inputs)


def form(case: Case, inputs: Inputs) -> str:
    x, seed, offset = inputs.args
    return decomposed(our_op(OP).supports(x, P, seed, offset))


def check_own_mask(case: Case, function: Callable[..., Tensor], inputs: Inputs) -> str | None:
    """On ones: the rate, and that the backward has the forward's mask."""
    ones = inputs.map(lambda t: torch.ones_like(t) if t.is_floating_point() else t)
    x = ones.args[0]
    out = function(*ones.args)
    (grad,) = torch.autograd.grad(out, x, ones.grad_outs)
    if not torch.equal(out, grad):
        return "forward and backward masks differ"
    return keep_rate_problem(out != 0, P)
