"""xtrain.ops.sdpa against cuDNN, FlashAttention 2 and compiled flex_attention, causal.

q, k and v lie in memory as projections leave them, [B, T, N, H] seen as [B, N, T, H].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.ops.common import (
    BEST_OTHER,
    EAGER,
    NEVER_SLOWER,
    OUR_ERROR_FACTOR,
    OURS,
    Case,
    Inputs,
    NotThere,
    Provider,
    Target,
    forward_and_backward,
    our_op,
)

OP = "sdpa"
QUESTION = "Does attention take the fastest kernel there is, and is ours as fast as flex_attention?"
TRITON, CUDNN, FLASH, FLEX = "xtrain, Triton", "cuDNN", "flash", "flex, compiled"
MODES = ("forward", "both")
VERSUS = (FLEX, CUDNN)
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

    def draw(heads: int) -> Tensor:
        return torch.randn(B, T, heads, H, dtype=case.dtype, device=device).transpose(1, 2)

    leaves = (draw(N), draw(M), draw(M))
    return Inputs(tuple(leaf.requires_grad_() for leaf in leaves), (draw(N),))


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


def ours(case: Case) -> Callable[..., Tensor]:
    public = our_op(OP).public
    return lambda q, k, v: public(q, k, v, causal=True)


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
        from xtrain.ops.sdpa.backward_kernel import sdpa_bwd

        q, k, v, out, lse = ctx.saved_tensors
        grads = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
        sdpa_bwd(grad_out, q, k, v, ctx.options, out, lse, grads)
        return grads


def our_kernel(case: Case) -> Callable[..., Tensor]:
    """Our own Triton kernels, whatever the op would pick."""
    if not torch.cuda.is_available():
        raise NotThere("needs a GPU")
    return TritonAttention.apply


PROVIDERS = {
    EAGER: Provider(torchs_own),
    CUDNN: Provider(library("CUDNN_ATTENTION")),
    FLASH: Provider(library("FLASH_ATTENTION")),
    FLEX: Provider(flex),
    TRITON: Provider(our_kernel, error_factor=OUR_ERROR_FACTOR),
    OURS: Provider(ours, error_factor=OUR_ERROR_FACTOR),
}
TARGETS = [
    Target("within 2% of the fastest", NEVER_SLOWER, BEST_OTHER, mode="forward"),
    Target("within 2% of the fastest", NEVER_SLOWER, BEST_OTHER),
    Target("at least as fast as flex_attention", 1.0, FLEX, of=TRITON),
]


def num_bytes(case: Case, mode: str) -> None:
    return None


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


def plain(case: Case) -> Callable[..., Tensor]:
    return explicit


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
