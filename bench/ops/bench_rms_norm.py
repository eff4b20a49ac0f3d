"""xtrain.ops.rms_norm against F.rms_norm and Liger, as residual-stream norm and as q/k norm."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.ops.common import (
    COPY,
    EAGER,
    INDUCTOR,
    LIGER,
    OUR_ERROR_FACTOR,
    OURS,
    SEE_THROUGH,
    Case,
    Inputs,
    Provider,
    Target,
    compiled_provider,
    decomposed,
    liger,
    never_slower,
    our_op,
    truth_by,
)

OP = "rms_norm"
QUESTION = "Is RMSNorm at the memory limit at every size?"
EPS = 1e-6
MODES = ("forward", "both")
CASES = {
    "cuda": [
        Case("8b stream", (32768, 4096), torch.bfloat16),
        Case("1b stream", (16384, 2048), torch.bfloat16),
        Case("124m stream", (32768, 768), torch.bfloat16),
        Case("q/k norm", (8 * 2048 * 32, 128), torch.bfloat16),
        Case("q/k norm, short", (32 * 1024 * 24, 64), torch.bfloat16),
    ],
    "cpu": [
        Case("odd", (67, 129), torch.bfloat16),
        Case("small stream", (2048, 256), torch.float32),
    ],
}


def make_inputs(case: Case, device: torch.device) -> Inputs:
    x, grad = (torch.randn(case.shape, dtype=case.dtype, device=device) for _ in range(2))
    weight = torch.rand(case.shape[-1], device=device).add(0.5).to(case.dtype)
    return Inputs((x.requires_grad_(), weight.requires_grad_()), (grad,))


def torchs_own(case: Case) -> Callable[..., Tensor]:
    return lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS)


def plain(case: Case) -> Callable[..., Tensor]:
    """The cast order of Llama's module, op by op."""

    def function(x: Tensor, weight: Tensor) -> Tensor:
        c = x.float()
        normalised = c * torch.rsqrt(c.pow(2).mean(-1, keepdim=True) + EPS)
        return weight * normalised.to(x.dtype)

    return function


def seen_through(case: Case) -> Callable[..., Tensor]:
    forward = our_op(OP).forward
    return lambda x, weight: forward(x, weight, EPS, "llama")


def ours(case: Case) -> Callable[..., Tensor]:
    public = our_op(OP).public
    return lambda x, weight: public(x, weight, EPS)


def ligers(case: Case) -> Callable[..., Tensor]:
    function = liger("rms_norm", "LigerRMSNormFunction")
    # in_place=False: by default its backward overwrites the incoming gradient
    return lambda x, weight: function.apply(x, weight, EPS, 0.0, "llama", False)


PROVIDERS = {
    EAGER: Provider(torchs_own),
    INDUCTOR: compiled_provider(torchs_own),
    SEE_THROUGH: compiled_provider(seen_through, error_factor=OUR_ERROR_FACTOR),
    OURS: Provider(ours, error_factor=OUR_ERROR_FACTOR),
    LIGER: Provider(ligers),
}
TARGETS = [
    Target("at least 92% of copy's bandwidth", 1 / 0.92, COPY, cases=("8b stream",)),
    *never_slower(),
]


def num_bytes(case: Case, mode: str) -> int:
    """x in, y out; then x and dy in, dx out. The weight and its gradient vanish beside them."""
    return {"forward": 2, "both": 5}[mode] * case.numel * case.dtype.itemsize


def num_flops(case: Case, mode: str) -> None:
    return None


def truth(case: Case, inputs: Inputs) -> list[Tensor]:
    return truth_by(torchs_own(case), inputs)


def form(case: Case, inputs: Inputs) -> str:
    return decomposed(our_op(OP).supports(*inputs.args, EPS))
