"""In attention: xtrain.ops.rope_qk, q and k in one launch, against plain PyTorch and Liger; sdpa.

sdpa against cuDNN, FlashAttention 2 and compiled flex_attention, causal. q, k and v lie in memory
as projections leave them, [B, T, N, H] seen as [B, N, T, H].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.ops.common import (
    BEST_OTHER,
    COPY,
    EAGER,
    NEVER_SLOWER,
    OUR_ERROR_FACTOR,
    OURS,
    Bench,
    Case,
    Inputs,
    NotThere,
    Provider,
    Target,
    decomposed,
    forward_and_backward,
    liger,
    never_slower,
    usual_providers,
)
from xtrain.ops import OPS

ROPE, SDPA = OPS["rope_qk"], OPS["sdpa"]


def as_projected(case: Case, device: torch.device, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, dtype=case.dtype, device=device).transpose(1, 2)


# --- rope -----------------------------------------------------------------------------------------


def _rope_case(
    name: str,
    shape: tuple[int, int, int, int, int],
    *,
    rotated: int | None = None,
    layout: str = "half",
    positions: bool = False,
) -> Case:
    options = {"rotated": rotated or shape[-1], "layout": layout, "positions": positions}
    return Case(name, shape, torch.bfloat16, options)


ROPE_CASES = {  # shape: B, T, N, M, H
    "cuda": [
        _rope_case("1b", (8, 2048, 32, 8, 128)),
        _rope_case("124m", (32, 1024, 12, 12, 64)),
        _rope_case(
            "half of H, interleaved, positions",
            (8, 2048, 32, 8, 128),
            rotated=64,
            layout="interleaved",
            positions=True,
        ),
    ],
    "cpu": [
        _rope_case("odd", (2, 7, 3, 1, 10), rotated=6, layout="interleaved", positions=True),
        _rope_case("small", (4, 256, 8, 8, 32)),
    ],
}


def make_rope_inputs(case: Case, device: torch.device) -> Inputs:
    B, T, N, M, H = case.shape

    def draw(heads: int) -> Tensor:
        return as_projected(case, device, (B, T, heads, H))

    rows = (B, T) if case.options["positions"] else (T,)
    angles = 100 * torch.rand(*rows, case.options["rotated"] // 2, device=device)
    q, k = draw(N).requires_grad_(), draw(M).requires_grad_()
    return Inputs((q, k, angles.cos(), angles.sin()), (draw(N), draw(M)))


def plain_rope(case: Case) -> Callable[..., tuple[Tensor, Tensor]]:
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


def num_rope_bytes(case: Case, mode: str) -> int:
    """q and k in and out, and the tables in fp32; the backward does the same once more."""
    B, T, N, M, H = case.shape
    tables = 2 * (B if case.options["positions"] else 1) * T * case.options["rotated"] // 2 * 4
    once = 2 * B * T * (N + M) * H * case.dtype.itemsize + tables
    return {"forward": 1, "both": 2}[mode] * once


# --- sdpa -----------------------------------------------------------------------------------------

TRITON, CUDNN, FLASH, FLEX = "xtrain, Triton", "cuDNN", "flash", "flex, compiled"
CASES = {  # shape: B, N, M, T, H
    "cuda": [
        Case("B8 H16 S2048 D64", (8, 16, 16, 2048, 64), torch.bfloat16),
        Case("B4 H32/8 S4096 D128", (4, 32, 8, 4096, 128), torch.bfloat16),
        Case("B1 H32/8 S16384 D128", (1, 32, 8, 16384, 128), torch.bfloat16),
    ],
    "cpu": [
        Case("odd", (2, 4, 2, 33, 24), torch.float32),
        Case("small", (4, 8, 8, 256, 32), torch.float32),
    ],
}


def make_inputs(case: Case, device: torch.device) -> Inputs:
    B, N, M, T, H = case.shape
    q, k, v, grad = (as_projected(case, device, (B, T, heads, H)) for heads in (N, M, M, N))
    return Inputs(tuple(leaf.requires_grad_() for leaf in (q, k, v)), (grad,))


def torchs_own(case: Case) -> Callable[..., Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def library(name: str) -> Callable[[Case], Callable[..., Tensor]]:
    """Return a builder of torch's attention held to one backend."""

    def build(case: Case) -> Callable[..., Tensor]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if not torch.cuda.is_available():
            raise NotThere("needs a GPU")
        backend, call = getattr(SDPBackend, name), torchs_own(case)

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return call(q, k, v)

        return function

    return build


def flex(case: Case) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not torch.cuda.is_available():
        raise NotThere("needs a GPU")
    T = case.shape[3]
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=True)


class TritonAttention(torch.autograd.Function):
    """Our launchers, called past the op's choice of a backend."""

    @staticmethod
    def forward(ctx, q, k, v):
        from xtrain.ops.sdpa.kernel import sdpa_fwd
        from xtrain.ops.sdpa.op import as_options

        ctx.options = as_options(q, causal=True)
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        sdpa_fwd(q, k, v, ctx.options, out, lse)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        from xtrain.ops.sdpa.kernel import sdpa_bwd

        q, k, v, out, lse = ctx.saved_tensors
        grads = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
        sdpa_bwd(grad_out, q, k, v, ctx.options, out, lse, grads)
        return grads


def our_kernel(case: Case) -> Callable[..., Tensor]:
    """Our own Triton kernels, whatever the op would pick."""
    if not torch.cuda.is_available():
        raise NotThere("needs a GPU")
    return TritonAttention.apply


def num_flops(case: Case, mode: str) -> int:
    """Two products forward, five backward (one recomputed), over the causal half."""
    B, N, _, T, H = case.shape
    product = 2 * B * N * T * T * H // 2
    return {"forward": 2, "both": 7}[mode] * product


# --- the truth of one group of heads of one sample, which depends on no other ---------------------


def _one_group(case: Case, inputs: Inputs) -> Inputs:
    groups = case.shape[1] // case.shape[2]
    q, k, v = (t.detach() for t in inputs.args)
    args = (q[:1, :groups], k[:1, :1], v[:1, :1])
    return Inputs(tuple(t.requires_grad_() for t in args), (inputs.grad_outs[0][:1, :groups],))


def trim(case: Case, results: list[Tensor]) -> list[Tensor]:
    groups = case.shape[1] // case.shape[2]
    out, grad_q, grad_k, grad_v = results
    return [out[:1, :groups], grad_q[:1, :groups], grad_k[:1, :1], grad_v[:1, :1]]


def explicit(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    T, H = q.shape[-2:]
    scores = (q @ k.transpose(-1, -2)) * H**-0.5
    later = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, float("-inf")).softmax(-1) @ v


def plain_results(case: Case, inputs: Inputs) -> list[Tensor]:
    return forward_and_backward(explicit, _one_group(case, inputs))


def truth(case: Case, inputs: Inputs) -> list[Tensor]:
    """Head by head: at 16384 tokens the scores of one head take 2 GiB in fp64."""
    group = _one_group(case, inputs).double()
    q, k, v = group.args
    outs, grads_q = [], []
    grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
    for head in range(q.shape[1]):
        one = Inputs((q[:, head : head + 1].detach().requires_grad_(), k, v), group.grad_outs)
        one.grad_outs = (group.grad_outs[0][:, head : head + 1],)
        out, grad_q, dk, dv = forward_and_backward(explicit, one)
        outs.append(out)
        grads_q.append(grad_q)
        grad_k += dk
        grad_v += dv
    return [torch.cat(outs, 1), torch.cat(grads_q, 1), grad_k, grad_v]


def form(case: Case, inputs: Inputs) -> str:
    from xtrain.ops.sdpa.op import sdpa_backend

    return f"takes {sdpa_backend(*inputs.args, causal=True)}"


BENCHES = (
    Bench(
        op="rope_qk",
        question="Is the rotation of queries and keys at the memory limit?",
        cases=ROPE_CASES,
        make_inputs=make_rope_inputs,
        plain=plain_rope,
        # Liger rotates q, k and their gradients in place
        providers=usual_providers(
            plain_rope,
            lambda case: lambda *args: ROPE.forward(*args, case.options["layout"]),
            lambda case: lambda *args: ROPE.public(*args, layout=case.options["layout"]),
            ligers,
            mutates=True,
        ),
        targets=[
            Target("at least 92% of copy's bandwidth", 1 / 0.92, COPY, cases=("1b",)),
            *never_slower(),
        ],
        num_bytes=num_rope_bytes,
        form=lambda case, inputs: decomposed(
            ROPE.supports(*inputs.args, layout=case.options["layout"])
        ),
    ),
    Bench(
        op="sdpa",
        question="Does attention take the fastest kernel there is, and is ours as fast as "
        "flex_attention?",
        cases=CASES,
        make_inputs=make_inputs,
        plain=lambda case: explicit,
        providers={
            EAGER: Provider(torchs_own),
            CUDNN: Provider(library("CUDNN_ATTENTION")),
            FLASH: Provider(library("FLASH_ATTENTION")),
            FLEX: Provider(flex),
            TRITON: Provider(our_kernel, error_factor=OUR_ERROR_FACTOR),
            OURS: Provider(
                lambda case: lambda q, k, v: SDPA.public(q, k, v, causal=True),
                error_factor=OUR_ERROR_FACTOR,
            ),
        },
        targets=[
            Target("within 2% of the fastest", NEVER_SLOWER, BEST_OTHER, mode="forward"),
            Target("within 2% of the fastest", NEVER_SLOWER, BEST_OTHER),
            Target("at least as fast as flex_attention", 1.0, FLEX, of=TRITON),
        ],
        num_flops=num_flops,
        truth=truth,
        form=form,
        trim=trim,
        plain_results=plain_results,
        versus=(FLEX, CUDNN),
    ),
)
