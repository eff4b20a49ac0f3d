"""The end of a residual branch, dropout + add + RMSNorm, in one kernel against the three in a row.

x is what the branch computed; h, the new residual stream, and y, its norm, are both returned and
both receive gradients. Under autocast the stream is fp32, and y goes back to x's dtype for the next
product.
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
    LIGER,
    OUR_ERROR_FACTOR,
    OURS,
    SEE_THROUGH,
    Case,
    Inputs,
    NotThere,
    Provider,
    Target,
    compiled_provider,
    decomposed,
    keep_rate_problem,
    liger,
    never_slower,
    our_op,
    truth_by,
)
from xtrain.ops.dropout.op import dropout_mask, dropout_reference

OP = "dropout_add_rms_norm"
QUESTION = "Do dropout, add and norm in one kernel reach the memory limit?"
EPS = 1e-6
SEED = -7046029254386353131
MODES = ("forward", "both")


def _case(
    name: str, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16, **options: object
) -> Case:
    return Case(name, shape, dtype, {"p": 0.1, "residual": dtype} | options)


CASES = {
    "cuda": [
        _case("8b stream", (32768, 4096)),
        _case("1b stream", (16384, 2048)),
        _case("124m stream", (32768, 768)),
        _case("8b stream, p 0", (32768, 4096), p=0.0),
        _case("124m stream, p 0", (32768, 768), p=0.0),
        _case("1b stream, fp32 residual", (16384, 2048), residual=torch.float32),
        _case("124m stream, fp32 residual", (32768, 768), residual=torch.float32),
    ],
    "cpu": [
        _case("odd", (67, 129)),
        _case("small stream", (2048, 256), torch.float32),
    ],
}


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """x, residual, weight, seed, offset; gradients of h and y."""

    def draw(dtype: torch.dtype) -> Tensor:
        return torch.randn(case.shape, dtype=dtype, device=device)

    stream = torch.promote_types(case.dtype, case.options["residual"])
    weight = torch.rand(case.shape[-1], device=device).add(0.5).to(stream)
    leaves = (draw(case.dtype), draw(case.options["residual"]), weight)
    seed = torch.tensor(SEED, device=device)
    offset = torch.zeros((), dtype=torch.int64, device=device)
    args = (*(leaf.requires_grad_() for leaf in leaves), seed, offset)
    return Inputs(args, (draw(stream), draw(case.dtype)))


def torchs_own(case: Case) -> Callable[..., tuple[Tensor, Tensor]]:
    p = case.options["p"]

    def function(x, residual, weight, seed, offset):
        h = residual + (F.dropout(x, p) if p else x)
        return h, F.rms_norm(h, weight.shape, weight, EPS).to(x.dtype)

    return function


def plain(case: Case) -> Callable[..., tuple[Tensor, Tensor]]:
    """The op's mask by torch's own select; Llama's norm, op by op."""
    p = case.options["p"]

    def function(x, residual, weight, seed, offset):
        if p:
            x = torch.where(dropout_mask(x.shape, p, seed, offset), x * (1 / (1 - p)), 0.0)
        h = residual + x
        c = h.float()
        normalised = c * torch.rsqrt(c.pow(2).mean(-1, keepdim=True) + EPS)
        return h, (weight * normalised.to(h.dtype)).to(x.dtype)

    return function


def the_op(case: Case) -> Callable[..., tuple[Tensor, ...]]:
    """The registered op itself, as xtrain's passes call it: with the dtype of y."""
    forward, p = our_op(OP).forward, case.options["p"]
    return lambda x, residual, weight, seed, offset: forward(
        x, residual, weight, p, seed, offset, EPS, "llama", case.dtype
    )


def ligers(case: Case) -> Callable[..., tuple[Tensor, Tensor]]:
    """F.dropout, then Liger's add and norm; it gives (norm, sum)."""
    function, p = liger("fused_add_rms_norm", "LigerFusedAddRMSNormFunction"), case.options["p"]
    if case.options["residual"] != case.dtype:
        raise NotThere("Liger's sum has x's dtype: it keeps no fp32 residual stream")

    def both(x, residual, weight, seed, offset):
        dropped = F.dropout(x, p) if p else x
        # in_place=False: otherwise its backward overwrites the incoming gradient
        return function.apply(dropped, residual, weight, EPS, 0.0, "llama", False)[1::-1]

    return both


def own(build: Callable[[Case], Callable[..., object]], compiled: bool = False) -> Provider:
    """Return a provider that draws torch's masks where p > 0."""
    return (compiled_provider if compiled else Provider)(build, own_mask=True)


PROVIDERS = {
    EAGER: own(torchs_own),
    INDUCTOR: own(torchs_own, compiled=True),
    SEE_THROUGH: compiled_provider(the_op, error_factor=OUR_ERROR_FACTOR),
    OURS: Provider(the_op, error_factor=OUR_ERROR_FACTOR),
    LIGER: own(ligers),
}
TARGETS = [
    Target("at least 95% of copy", 1 / 0.95, COPY, mode="forward", cases=("8b stream",)),
    Target("at most 1.10 x the floor", 1.10, COPY, cases=("8b stream",)),
    Target("at most 1.25 x the floor", 1.25, COPY, cases=("1b stream", "124m stream")),
    *never_slower(),
]


def num_bytes(case: Case, mode: str) -> int:
    """x and residual in, h and y out; then both their gradients and h in, both gradients out.

    Without dropout x and residual have one gradient, where they have one dtype.
    """
    stream = torch.promote_types(case.dtype, case.options["residual"])
    x, h, residual = case.dtype.itemsize, stream.itemsize, case.options["residual"].itemsize
    forward = x + residual + h + x
    shared = case.options["p"] == 0 and x == residual
    backward = h + x + h + residual + (0 if shared else x)
    return {"forward": forward, "both": forward + backward}[mode] * case.numel


def num_flops(case: Case, mode: str) -> None:
    return None


def truth(case: Case, inputs: Inputs) -> list[Tensor]:
    p = case.options["p"]

    def function(x, residual, weight, seed, offset):
        h = residual + dropout_reference(x, p, seed, offset)
        return h, F.rms_norm(h, weight.shape, weight, EPS)

    return truth_by(function, inputs)


def form(case: Case, inputs: Inputs) -> str:
    x, residual, weight, seed, offset = inputs.args
    return decomposed(
        our_op(OP).supports(x, residual, weight, case.options["p"], seed, offset, EPS)
    )


def check_own_mask(case: Case, function: Callable[..., tuple], inputs: Inputs) -> str | None:
    """On x = 1 and residual = 0: the rate, the norm of what was kept, the mask of the backward."""
    p = case.options["p"]
    x, residual, weight, seed, offset = (t.detach() for t in inputs.args)
    ones = torch.ones_like(x).requires_grad_()
    args = (ones, torch.zeros_like(residual).requires_grad_(), weight.requires_grad_())
    h, y = function(*args, seed, offset)
    (grad,) = torch.autograd.grad((h, y), ones, (torch.ones_like(h), torch.zeros_like(y)))
    kept = h != 0
    if not torch.equal(grad != 0, kept):
        return "forward and backward masks differ"
    right = F.rms_norm(h.double(), weight.shape, weight.double(), EPS)
    error = float((y.double() - right).detach().abs().max())
    scale = float(right.detach().abs().max())
    if (
        error > 4 * torch.finfo(y.dtype).eps * scale
    ):  # roundings of the norm, the weight, the result
        return f"the norm is wrong by {error:.3g} of {scale:.3g}"
    return keep_rate_problem(kept, p)
