"""On the residual stream: dropout, RMSNorm, and both with the add between them in one kernel.

dropout against F.dropout. Seeds are tensors, as in a compiled training step: a fresh one per call
would be timed along.
rms_norm against F.rms_norm and Liger, as norm of the stream and of queries and keys.
dropout_add_rms_norm against the three in a row: x is what a branch computed; h, the new stream, and
y, its norm, are both returned and both receive gradients. Under autocast the stream is fp32, and y
goes back to x's dtype for the next product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.ops.common import (
    COPY,
    Bench,
    Case,
    Inputs,
    NotThere,
    Target,
    keep_rate_problem,
    liger,
    truth_by,
    usual_providers,
)
from xtrain.ops import OPS
from xtrain.ops.dropout.op import dropout_mask, dropout_reference

P = 0.1
EPS = 1e-6
SEED = -7046029254386353131
DROPOUT, NORM, FUSED = OPS["dropout"], OPS["rms_norm"], OPS["dropout_add_rms_norm"]


def _seed_and_offset(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.tensor(SEED, device=device), torch.zeros((), dtype=torch.int64, device=device)


# --- dropout --------------------------------------------------------------------------------------

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
    return Inputs((x.requires_grad_(), *_seed_and_offset(device)), (grad,))


def torchs_own(case: Case) -> Callable[..., Tensor]:
    return lambda x, seed, offset: F.dropout(x, P, training=True)


def selected(x: Tensor, p: float, seed: Tensor, offset: Tensor) -> Tensor:
    """The op's mask by torch's own select, in x's dtype."""
    return torch.where(dropout_mask(x.shape, p, seed, offset), x * (1 / (1 - p)), 0.0)


def num_bytes(case: Case, mode: str) -> int:
    """x in and out, then the gradient in and out; no mask."""
    return {"forward": 2, "both": 4}[mode] * case.numel * case.dtype.itemsize


def check_own_mask(case: Case, function: Callable[..., Tensor], inputs: Inputs) -> str | None:
    """On ones: the rate, and that the backward has the forward's mask."""
    ones = inputs.map(lambda t: torch.ones_like(t) if t.is_floating_point() else t)
    x = ones.args[0]
    out = function(*ones.args)
    (grad,) = torch.autograd.grad(out, x, ones.grad_outs)
    if not torch.equal(out, grad):
        return "forward and backward masks differ"
    return keep_rate_problem(out != 0, P)


# --- RMSNorm --------------------------------------------------------------------------------------

NORM_CASES = {
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


def make_norm_inputs(case: Case, device: torch.device) -> Inputs:
    x, grad = (torch.randn(case.shape, dtype=case.dtype, device=device) for _ in range(2))
    weight = torch.rand(case.shape[-1], device=device).add(0.5).to(case.dtype)
    return Inputs((x.requires_grad_(), weight.requires_grad_()), (grad,))


def torchs_norm(case: Case) -> Callable[..., Tensor]:
    return lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS)


def llamas_norm(x: Tensor, weight: Tensor) -> Tensor:
    """The cast order of Llama's module, op by op."""
    c = x.float()
    normalised = c * torch.rsqrt(c.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * normalised.to(x.dtype)


def ligers_norm(case: Case) -> Callable[..., Tensor]:
    function = liger("rms_norm", "LigerRMSNormFunction")
    # in_place=False: by default its backward overwrites the incoming gradient
    return lambda x, weight: function.apply(x, weight, EPS, 0.0, "llama", False)


def num_norm_bytes(case: Case, mode: str) -> int:
    """x in, y out; then x and dy in, dx out. The weight and its gradient vanish beside them."""
    return {"forward": 2, "both": 5}[mode] * case.numel * case.dtype.itemsize


# --- dropout + add + norm -------------------------------------------------------------------------


def _fused_case(
    name: str, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16, **options: object
) -> Case:
    return Case(name, shape, dtype, {"p": P, "residual": dtype} | options)


FUSED_CASES = {
    "cuda": [
        _fused_case("8b stream", (32768, 4096)),
        _fused_case("1b stream", (16384, 2048)),
        _fused_case("124m stream", (32768, 768)),
        _fused_case("8b stream, p 0", (32768, 4096), p=0.0),
        _fused_case("124m stream, p 0", (32768, 768), p=0.0),
        _fused_case("1b stream, fp32 residual", (16384, 2048), residual=torch.float32),
        _fused_case("124m stream, fp32 residual", (32768, 768), residual=torch.float32),
    ],
    "cpu": [
        _fused_case("odd", (67, 129)),
        _fused_case("small stream", (2048, 256), torch.float32),
    ],
}


def make_fused_inputs(case: Case, device: torch.device) -> Inputs:
    """x, residual, weight, seed, offset; gradients of h and y."""

    def draw(dtype: torch.dtype) -> Tensor:
        return torch.randn(case.shape, dtype=dtype, device=device)

    stream = torch.promote_types(case.dtype, case.options["residual"])
    weight = torch.rand(case.shape[-1], device=device).add(0.5).to(stream)
    leaves = (draw(case.dtype), draw(case.options["residual"]), weight)
    args = (*(leaf.requires_grad_() for leaf in leaves), *_seed_and_offset(device))
    return Inputs(args, (draw(stream), draw(case.dtype)))


def torchs_three(case: Case) -> Callable[..., tuple[Tensor, Tensor]]:
    p = case.options["p"]

    def function(x, residual, weight, seed, offset):
        h = residual + (F.dropout(x, p) if p else x)
        return h, F.rms_norm(h, weight.shape, weight, EPS).to(x.dtype)

    return function


def plain_fused(case: Case) -> Callable[..., tuple[Tensor, Tensor]]:
    """The op's mask; Llama's norm, op by op."""
    p = case.options["p"]

    def function(x, residual, weight, seed, offset):
        h = residual + (selected(x, p, seed, offset) if p else x)
        return h, llamas_norm(h, weight).to(x.dtype)

    return function


def the_op(case: Case) -> Callable[..., tuple[Tensor, ...]]:
    """The registered op itself, as xtrain's passes call it: with the dtype of y."""
    p = case.options["p"]
    return lambda x, residual, weight, seed, offset: FUSED.forward(
        x, residual, weight, p, seed, offset, EPS, "llama", case.dtype
    )


def ligers_fused(case: Case) -> Callable[..., tuple[Tensor, Tensor]]:
    """F.dropout, then Liger's add and norm; it gives (norm, sum)."""
    function, p = liger("fused_add_rms_norm", "LigerFusedAddRMSNormFunction"), case.options["p"]
    if case.options["residual"] != case.dtype:
        raise NotThere("Liger's sum has x's dtype: it keeps no fp32 residual stream")

    def both(x, residual, weight, seed, offset):
        dropped = F.dropout(x, p) if p else x
        # in_place=False: otherwise its backward overwrites the incoming gradient
        return function.apply(dropped, residual, weight, EPS, 0.0, "llama", False)[1::-1]

    return both


def num_fused_bytes(case: Case, mode: str) -> int:
    """x and residual in, h and y out; then both their gradients and h in, both gradients out.

    Without dropout x and residual have one gradient, where they have one dtype.
    """
    stream = torch.promote_types(case.dtype, case.options["residual"])
    x, h, residual = case.dtype.itemsize, stream.itemsize, case.options["residual"].itemsize
    forward = x + residual + h + x
    shared = case.options["p"] == 0 and x == residual
    backward = h + x + h + residual + (0 if shared else x)
    return {"forward": forward, "both": forward + backward}[mode] * case.numel


def fused_truth(case: Case, inputs: Inputs) -> list[Tensor]:
    def function(x, residual, weight, seed, offset):
        h = residual + dropout_reference(x, case.options["p"], seed, offset)
        return h, F.rms_norm(h, weight.shape, weight, EPS)

    return truth_by(function, inputs)


def fused_supports(case: Case, inputs: Inputs) -> str | None:
    x, residual, weight, seed, offset = inputs.args
    return FUSED.supports(x, residual, weight, case.options["p"], seed, offset, EPS)


def check_fused_mask(case: Case, function: Callable[..., Any], inputs: Inputs) -> str | None:
    """On x = 1 and residual = 0: the rate, the norm of what was kept, the mask of the backward."""
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
    # roundings of the norm, the weight, the result
    if error > 4 * torch.finfo(y.dtype).eps * scale:
        return f"the norm is wrong by {error:.3g} of {scale:.3g}"
    return keep_rate_problem(kept, case.options["p"])


DROPOUT_BENCH = Bench(
    op="dropout",
    question="What does seeded dropout cost an element, against torch's own, eager and compiled?",
    cases=CASES,
    make_inputs=make_inputs,
    plain=lambda case: lambda x, seed, offset: selected(x, P, seed, offset),
    providers=usual_providers(
        torchs_own,
        lambda case: lambda x, seed, offset: DROPOUT.forward(x, P, seed, offset),
        lambda case: lambda x, seed, offset: DROPOUT.public(x, P, seed, offset),
        own_mask=True,
    ),
    targets=[Target.near_copy(85, "8b stream", mode="forward")],
    num_bytes=num_bytes,
    truth=lambda case, inputs: truth_by(
        lambda x, seed, offset: dropout_reference(x, P, seed, offset), inputs
    ),
    supports=lambda case, inputs: DROPOUT.supports(inputs.args[0], P, *inputs.args[1:]),
    check_own_mask=check_own_mask,
)
NORM_BENCH = Bench(
    op="rms_norm",
    question="Is RMSNorm at the memory limit at every size?",
    cases=NORM_CASES,
    make_inputs=make_norm_inputs,
    plain=lambda case: llamas_norm,
    providers=usual_providers(
        torchs_norm,
        lambda case: lambda x, weight: NORM.forward(x, weight, EPS, "llama"),
        lambda case: lambda x, weight: NORM.public(x, weight, EPS),
        ligers_norm,
    ),
    targets=[Target.near_copy(92, "8b stream"), *Target.never_slower()],
    num_bytes=num_norm_bytes,
    truth=lambda case, inputs: truth_by(torchs_norm(case), inputs),
    supports=lambda case, inputs: NORM.supports(*inputs.args, EPS),
)
FUSED_BENCH = Bench(
    op="dropout_add_rms_norm",
    question="Do dropout, add and norm in one kernel reach the memory limit?",
    cases=FUSED_CASES,
    make_inputs=make_fused_inputs,
    plain=plain_fused,
    providers=usual_providers(torchs_three, the_op, the_op, ligers_fused, own_mask=True),
    targets=[
        Target("at least 95% of copy", 1 / 0.95, COPY, mode="forward", cases=("8b stream",)),
        Target("at most 1.10 x the floor", 1.10, COPY, cases=("8b stream",)),
        Target("at most 1.25 x the floor", 1.25, COPY, cases=("1b stream", "124m stream")),
        *Target.never_slower(),
    ],
    num_bytes=num_fused_bytes,
    truth=fused_truth,
    supports=fused_supports,
    check_own_mask=check_fused_mask,
)
BENCHES = (DROPOUT_BENCH, NORM_BENCH, FUSED_BENCH)
