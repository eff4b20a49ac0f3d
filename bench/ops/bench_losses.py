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
    """Loss and gradients in fp64, some rows of logits at a time."""
    hidden, weight = (t.detach().double().requires_grad_() for t in inputs.args[:2])
    targets = inputs.args[2]
    loss, counted = torch.zeros_like(hidden[0, 0]), (targets != -100).sum()
    for rows, goals in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True):
        part = F.cross_entropy(rows @ weight.T, goals, reduction="sum") / counted
        part.backward()
        loss = loss + part.detach()
    return [loss, hidden.grad, weight.grad]


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
        supports=lambda case, inputs: OP.supports(*inputs.args),
    ),
)
