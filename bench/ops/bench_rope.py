"""xtrain.ops.rope_qk, q and k in one launch, against plain PyTorch and Liger.

q and k lie in memory as projections leave them, [B, T, N, H] seen as [B, N, T, H].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bench.ops.common import (
    COPY,
    Bench,
    Case,
    Inputs,
    NotThere,
    Target,
    decomposed,
    liger,
    never_slower,
    usual_providers,
)
from xtrain.ops import OPS

OP = OPS["rope_qk"]


def _case(
    name: str,
    shape: tuple[int, int, int, int, int],
    *,
    rotated: int | None = None,
    layout: str = "half",
    positions: bool = False,
) -> Case:
    options = {"rotated": rotated or shape[-1], "layout": layout, "positions": positions}
    return Case(name, shape, torch.bfloat16, options)


CASES = {  # shape: B, T, N, M, H
    "cuda": [
        _case("1b", (8, 2048, 32, 8, 128)),
        _case("124m", (32, 1024, 12, 12, 64)),
        _case(
            "half of H, interleaved, positions",
            (8, 2048, 32, 8, 128),
            rotated=64,
            layout="interleaved",
            positions=True,
        ),
    ],
    "cpu": [
        _case("odd", (2, 7, 3, 1, 10), rotated=6, layout="interleaved", positions=True),
        _case("small", (4, 256, 8, 8, 32)),
    ],
}


def make_inputs(case: Case, device: torch.device) -> Inputs:
    B, T, N, M, H = case.shape

    def draw(heads: int) -> Tensor:
        return torch.randn(B, T, heads, H, dtype=case.dtype, device=device).transpose(1, 2)

    rows = (B, T) if case.options["positions"] else (T,)
    angles = 100 * torch.rand(*rows, case.options["rotated"] // 2, device=device)
    q, k = draw(N).requires_grad_(), draw(M).requires_grad_()
    return Inputs((q, k, angles.cos(), angles.sin()), (draw(N), draw(M)))


def plain(case: Case) -> Callable[..., tuple[Tensor, Tensor]]:
    """Each pair (a, b) becomes (a cos - b sin, b cos + a sin), in the tables' dtype."""
    rotated, layout = case.options["rotated"], case.options["layout"]

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if cos.dim() == 3:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        head, rest = x[..., :rotated], x[..., rotated:]
        if layout == "half":
            a, b = head.chunk(2, -1)
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        else:
            a, b = head[..., ::2], head[..., 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        turned = turned.to(x.dtype)
        return torch.cat([turned, rest], -1) if rotated < x.shape[-1] else turned

    return lambda q, k, cos, sin: (turn(q, cos, sin), turn(k, cos, sin))


def seen_through(case: Case) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda q, k, cos, sin: OP.forward(q, k, cos, sin, case.options["layout"])


def ours(case: Case) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda q, k, cos, sin: OP.public(q, k, cos, sin, layout=case.options["layout"])


def ligers(case: Case) -> Callable[..., tuple[Tensor, Tensor]]:
    function = liger("rope", "LigerRopeFunction")
    if case.options["layout"] != "half" or case.options["rotated"] != case.shape[-1]:
        raise NotThere("Liger rotates whole heads in halves alone")
    tables: list[Tensor] = []  # of the width that Liger wants; made once, as a model would

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if not tables:
            tables.extend(torch.cat([t, t], -1).unsqueeze(0) for t in (cos, sin))
        return function.apply(q, k, *tables)[:2]

    return rotate


def num_bytes(case: Case, mode: str) -> int:
    """q and k in and out, and the tables in fp32; the backward does the same once more."""
    B, T, N, M, H = case.shape
    tables = 2 * (B if case.options["positions"] else 1) * T * case.options["rotated"] // 2 * 4
    once = 2 * B * T * (N + M) * H * case.dtype.itemsize + tables
    return {"forward": 1, "both": 2}[mode] * once


BENCHES = (
    Bench(
        op="rope_qk",
        question="Is the rotation of queries and keys at the memory limit?",
        cases=CASES,
        make_inputs=make_inputs,
        plain=plain,
        # Liger rotates q, k and their gradients in place
        providers=usual_providers(plain, seen_through, ours, ligers, mutates=True),
        targets=[
            Target("at least 92% of copy's bandwidth", 1 / 0.92, COPY, cases=("1b",)),
            *never_slower(),
        ],
        num_bytes=num_bytes,
        form=lambda case, inputs: decomposed(
            OP.supports(*inputs.args, layout=case.options["layout"])
        ),
    ),
)
