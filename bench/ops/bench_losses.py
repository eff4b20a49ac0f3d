"""xtrain.ops.linear_cross_entropy, LM head and loss in one, against the plain pair and Liger.

Both gradients are returned. Forward alone is not timed: some of these form gradients in it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.ops.common import (
    INDUCTOR,
    LIGER,
    Bench,
    Case,
    Inputs,
    Provider,
    Target,
    decomposed,
    liger,
    usual_providers,
)
from xtrain.ops import OPS

OP = OPS["linear_cross_entropy"]
LEAN = "xtrain, bf16 sums"  # the weight gradient accumulated in bf16 over chunks of tokens
CHUNK = 1024  # rows of the fp64 truth formed at a time
CASES = {  # shape: T, D
    "cuda": [
        Case("V 50304", (16384, 2048), torch.bfloat16, {"V": 50304}),
        Case("V 128256", (16384, 2048), torch.bfloat16, {"V": 128256}),
    ],
    "cpu": [
        Case("odd", (67, 33), torch.bfloat16, {"V": 101}),
        Case("small", (1024, 128), torch.float32, {"V": 2048}),
    ],
}


def make_inputs(case: Case, device: torch.device) -> Inputs:
    T, D = case.shape
    V = case.options["V"]
    hidden = torch.randn(T, D, dtype=case.dtype, device=device)
    weight = (torch.randn(V, D, dtype=torch.float32, device=device) / D**0.5).to(case.dtype)
    targets = torch.randint(V, (T,), device=device)
    targets[:: max(T // 8, 1)] = -100
    grad = torch.ones((), dtype=torch.float32, device=device)
    return Inputs((hidden.requires_grad_(), weight.requires_grad_(), targets), (grad,))


def plain(case: Case) -> Callable[..., Tensor]:
    return lambda hidden, weight, targets: F.cross_entropy((hidden @ weight.T).float(), targets)


def lean(case: Case) -> Callable[..., Tensor]:
    return lambda hidden, weight, targets: OP.public(
        hidden, weight, targets, weight_grad_accumulation="same"
    )


def ligers(case: Case) -> Callable[..., Tensor]:
    function = liger("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction")

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        found = function.apply(hidden, weight, targets)
        return found[0] if isinstance(found, tuple) else found

    return loss


def num_flops(case: Case, mode: str) -> int:
    """Three products: logits, and the gradients of hidden and weight; recomputation not counted."""
    T, D = case.shape
    return 3 * 2 * T * D * case.options["V"]


def truth(case: Case, inputs: Inputs) -> list[Tensor]:
    """Loss and gradients in fp64 by the formula, some rows of logits at a time."""
    hidden, weight, targets = (t.detach() for t in inputs.args)
    weight = weight.double()
    counted = int((targets != -100).sum())
    loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
    grad_hidden = torch.empty(hidden.shape, dtype=torch.float64, device=hidden.device)
    grad_weight = torch.zeros_like(weight)
    for start in range(0, hidden.shape[0], CHUNK):
        rows, goals = hidden[start : start + CHUNK].double(), targets[start : start + CHUNK]
        logits = rows @ weight.T
        counts = (goals != -100).unsqueeze(1)
        goal = goals.clamp(min=0).unsqueeze(1)
        lse = logits.logsumexp(1, keepdim=True)
        loss += ((lse - logits.gather(1, goal)) * counts).sum() / counted
        grad = torch.exp(logits - lse)
        grad.scatter_add_(1, goal, torch.full_like(lse, -1.0))
        grad *= counts / counted
        grad_hidden[start : start + CHUNK] = grad @ weight
        grad_weight += grad.T @ rows
    return [loss, grad_hidden, grad_weight]


BENCHES = (
    Bench(
        op="linear_cross_entropy",
        question="Is the loss without whole logits as fast as the plain one, in how much less "
        "memory?",
        cases=CASES,
        make_inputs=make_inputs,
        plain=plain,
        providers=usual_providers(plain, None, lambda case: OP.public)
        | {LEAN: Provider(lean), LIGER: Provider(ligers)},
        targets=[
            Target("takes at most inductor's time", 1.0, INDUCTOR),
            Target("at most 3% over inductor's time", 1.03, INDUCTOR, of=LEAN),
            Target("holds its peak", 0.70, cases=("V 50304",)),
            Target("holds its peak", 1.65, cases=("V 128256",)),
            Target("holds its peak", 0.40, of=LEAN, cases=("V 50304",)),
            Target("holds its peak", 0.75, of=LEAN, cases=("V 128256",)),
        ],
        num_flops=num_flops,
        modes=("both",),
        truth=truth,
        form=lambda case, inputs: decomposed(OP.supports(*inputs.args)),
    ),
)
