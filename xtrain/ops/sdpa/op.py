"""Scaled dot-product attention with grouped heads, masks, windows and softcap.

    scores = softcap(scale * q k^T)            softcap(s) = softcap * tanh(s / softcap)
    bias   = 0 where query i sees key j, -inf where not, + the additive mask
    out    = softmax(scores + bias) v          0 in a row that sees nothing

Causal and window are aligned bottom-right: query i sees key j iff
i + S - T - window < j <= i + S - T. Query head n uses KV head n // (N / M).

Letters: B batch, N query heads, M KV heads, G = N / M, T query length, S key length, H head dim.
"""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from xtrain import torch_compat
from xtrain.ops import core
from xtrain.ops.core import compute_dtype
from xtrain.ops.sdpa import library
from xtrain.ops.sdpa.decomposition import (
    Options,
    choose_kernel,
    empty_in_layout,
    lse_like,
    plan_of,
    sdpa_backward_decomposition,
    sdpa_decomposition,
)
from xtrain.ops.shared.layout import contiguous, dense, memory_order

# In 16 bits wider tiles leave no room for two operands in shared memory. fp32 is multiplied in
# parts (tf32x3), whose error was 0.8 of twice plain PyTorch's at head dim 192 and 1.3 at 256.
LARGEST_HEAD_DIM = {torch.bfloat16: 256, torch.float16: 256, torch.float32: 128}


def as_options(
    q: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    documents: Tensor | None = None,
) -> Options:
    """Return the keywords of `sdpa` as the op takes them: a window is causal, scale a number."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return Options(mask, causal or window is not None, scale, window, softcap, documents)


def sdpa_reference(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
    """Return attention by matmul and softmax in c, materialising the scores; differentiable."""
    mask, causal, scale, window, softcap, documents = as_options(q, **keywords)
    c = compute_dtype(q.dtype)
    groups = q.shape[1] // k.shape[1]
    keys = k.to(c).repeat_interleave(groups, dim=1)
    values = v.to(c).repeat_interleave(groups, dim=1)
    scores = q.to(c) @ keys.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    T, S = scores.shape[-2:]
    sees = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if causal:
        i = torch.arange(T, device=q.device)[:, None]
        j = torch.arange(S, device=q.device)[None, :]
        sees = j <= i + S - T
        if window is not None:
            sees = sees & (j > i + S - T - window)
    if documents is not None:
        sees = sees & (documents[:, None, :, None] == documents[:, None, None, :])
    if mask is not None and mask.dtype == torch.bool:
        sees = sees & mask
    elif mask is not None:
        scores = scores + mask.to(c)
        sees = sees & (mask != -math.inf)
    sees = sees.expand(scores.shape)
    sees_any = sees.any(-1, keepdim=True)
    # A row of -inf alone has no softmax: give it a 0 to work on, then clear it.
    scores = scores.masked_fill(~sees, -math.inf).masked_fill(~sees_any, 0.0)
    probabilities = torch.softmax(scores, dim=-1).masked_fill(~sees_any, 0.0)
    return (probabilities @ values).to(q.dtype)


# --- The op: each function takes the tensors and one record of options ---------------------------


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    return empty_in_layout(q, v.shape[3]), lse_like(q)


def _forward_eager(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    out, lse = sdpa_decomposition(q, k, v, options)
    return dense(out, memory_order(q)), contiguous(lse)


def _forward_cuda(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    if backend_of(q, k, v, options)[0] != "triton":
        return _forward_eager(q, k, v, options)
    return forward_by_kernel(q, k, v, options)


def forward_by_kernel(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Return (out, lse) by our kernel."""
    out, lse = empty_in_layout(q, v.shape[3]), lse_like(q)
    launch = import_module("xtrain.ops.sdpa.kernel").sdpa_fwd
    launch(q, k, v, options.within(k.shape[2]), out, lse)
    return out, lse


def _backward_fake(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, options: Options, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_q, grad_k, grad_v = (empty_in_layout(x, x.shape[3]) for x in (q, k, v))
    *_, need_mask_grad = rest
    mask = options.mask
    if mask is None or not need_mask_grad:
        return grad_q, grad_k, grad_v, q.new_empty(0)
    return grad_q, grad_k, grad_v, torch.empty(mask.shape, dtype=mask.dtype, device=mask.device)


def _backward_eager(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, options: Options, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *grads, grad_mask = sdpa_backward_decomposition(grad_out, q, k, v, options, *rest)
    grad_q, grad_k, grad_v = (
        dense(grad, memory_order(x)) for grad, x in zip(grads, (q, k, v), strict=True)
    )
    return grad_q, grad_k, grad_v, contiguous(grad_mask)


def _backward_cuda(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    out: Tensor,
    lse: Tensor,
    need_mask_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if backend_of(q, k, v, options)[0] != "triton":
        return _backward_eager(grad_out, q, k, v, options, out, lse, need_mask_grad)
    return *backward_by_kernels(grad_out, q, k, v, options, out, lse), q.new_empty(0)


def backward_by_kernels(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (grad_q, grad_k, grad_v) by our kernels; out and lse from any backend."""
    grad_q, grad_k, grad_v = (empty_in_layout(x, x.shape[3]) for x in (q, k, v))
    launch = import_module("xtrain.ops.sdpa.kernel").sdpa_bwd
    grads = (grad_q, grad_k, grad_v)
    launch(grad_out, q, k, v, options.within(k.shape[2]), out, lse, grads)
    return grads


FORWARD = core.define_op(
    "sdpa(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale, int? window, "
    "float? softcap, Tensor? documents=None, bool opaque=False) -> (Tensor, Tensor)",
    records=(Options,),
    fake=_forward_fake,
    decomposition=sdpa_decomposition,
    cpu=_forward_eager,
    cuda=_forward_cuda,
    replay_state=library.switches,
)
BACKWARD = core.define_op(
    "sdpa_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out, "
    "Tensor lse, bool causal, float scale, int? window, float? softcap, bool need_mask_grad, "
    "Tensor? documents=None, bool opaque=False) -> (Tensor, Tensor, Tensor, Tensor)",
    records=(Options,),
    fake=_backward_fake,
    decomposition=sdpa_backward_decomposition,
    cpu=_backward_eager,
    cuda=_backward_cuda,
    replay_state=library.switches,
)


core.define_derivative(FORWARD, BACKWARD, outputs=("out", "lse"))


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """Return softmax(softcap(scale * q k^T) + bias) v, per head.

    Shapes:   q (B, N, T, H); k, v (B, M, S, H), N a multiple of M: query head n uses KV head
              n // (N / M); any strides, read in place where those of H are 1; result (B, N, T, H),
              dense in q's order of batch, heads and tokens; each gradient in its tensor's.
    Args:     mask: bool (True = attend) or float (added to the scores), broadcastable to
              (B, N, T, S); with causal, both must allow.
              causal: query i sees key j iff j <= i + S - T (bottom-right).
              scale: default 1 / sqrt(H).
              window: i + S - T - window < j <= i + S - T; a window is causal by itself.
              softcap: scores become softcap * tanh(scores / softcap), before the mask.
              documents: int32 or int64 (B, T), with T = S: a query sees only keys of its own
              number (texts packed into one row). Any numbers; runs of equal ones are fastest.
    Grad:     of q, k, v and of a float mask; saves them, the result and lse (B, N, T), no scores.
    Numerics: softmax in fp32 (fp64 for fp64). A row that sees nothing (bool False, or -inf) gives
              exact zeros and zero gradients; finite minima are ordinary numbers.
    Raises:   ValueError for shapes, dtypes or options that do not fit, with their values.
    Source:   Vaswani et al. 2017; grouped heads: Ainslie et al. 2023; softcap: Gemma 2, 2024.
    """
    options = as_options(
        q,
        mask=mask,
        causal=causal,
        scale=scale,
        window=window,
        softcap=softcap,
        documents=documents,
    )
    check_inputs(q, k, v, options)
    opaque = core.opaque(prefers_kernel, q, k, v, mask=mask, scale=scale)
    return FORWARD(q, k, v, *options, opaque)[0]


def check_inputs(q: Tensor, k: Tensor, v: Tensor, options: Options) -> None:
    """Raise ValueError, with the values, for what `sdpa` cannot compute."""
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(
            f"sdpa: q, k and v must be [batch, heads, length, head dim], got {_shapes(q, k, v)}"
        )
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"sdpa: shapes do not fit together: {_shapes(q, k, v)}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(
            f"sdpa: {q.shape[1]} query heads cannot be shared out among {k.shape[1]} KV heads: "
            "the first number must be a multiple of the second"
        )
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point:
        raise ValueError(
            f"sdpa: q, k and v must have one float dtype, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    mask, _, _, window, softcap, documents = options
    if window is not None and window < 1:
        raise ValueError(f"sdpa: window must be at least 1, got {window}: None means no window")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"sdpa: softcap must be positive, got {softcap}: None means no cap")
    if mask is not None:
        _check_mask(mask, (q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
    if documents is not None:
        _check_documents(documents, q, k)


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"


def _check_mask(mask: Tensor, full: tuple[int, int, int, int]) -> None:
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise ValueError(
            f"sdpa: mask must be bool (True = attend) or float (added), got {mask.dtype}"
        )
    sizes = zip(reversed(mask.shape), reversed(full), strict=False)
    if mask.dim() > 4 or any(size != 1 and size != want for size, want in sizes):
        raise ValueError(f"sdpa: mask {tuple(mask.shape)} does not broadcast to {full}")


def _check_documents(documents: Tensor, q: Tensor, k: Tensor) -> None:
    if documents.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"sdpa: documents must be int32 or int64, got {documents.dtype}")
    if documents.shape != (q.shape[0], q.shape[2]) or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"sdpa: documents {tuple(documents.shape)} must be [batch, length] of queries and keys "
            f"alike, got {q.shape[2]} queries and {k.shape[2]} keys of batch {q.shape[0]}"
        )


# --- Which form ----------------------------------------------------------------------------------


def supports(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> str | None:
    """Return why no fused kernel, torch's or ours, takes these inputs, or None when one does.

    keywords: those of `sdpa`, here and below.
    """
    if prefers_kernel(q, k, v, **keywords):
        check_inputs(q, k, v, as_options(q, **keywords))
        return None  # at any length: passes ask with symbolic ones
    backend = sdpa_backend(q, k, v, **keywords)
    return backend if backend.startswith("explicit") else None


def prefers_kernel(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> bool:
    """Return whether inductor keeps the op: where it runs a fused kernel for every length.

    There is nothing to fuse with, and the choice among the kernels is made on real tensors. With a
    mask tensor, inductor fuses what builds the bias for torch's kernel, or the scores.
    """
    return triton_refuses(q, v, as_options(q, **keywords)) is None


def sdpa_backend(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> str:
    """Return what computes `sdpa` of these inputs: a kernel's name, or "explicit: " and why."""
    options = as_options(q, **keywords)
    check_inputs(q, k, v, options)
    kernel, reason = backend_of(q, k, v, options)
    return kernel or f"explicit: {reason}"


def triton_refuses(q: Tensor, v: Tensor, options: Options) -> str | None:
    """Return why our kernel cannot take these inputs, or None when it can."""
    if not q.is_cuda:
        return f"tensors are on {q.device.type}, the kernel runs on cuda"
    if options.mask is not None:
        return "a mask tensor is given; the kernel takes causal, window and documents"
    if q.dtype not in LARGEST_HEAD_DIM:
        return f"tensors are {q.dtype}; the kernel takes bf16, fp16 and fp32"
    if max(q.shape[-1], v.shape[-1]) > (largest := LARGEST_HEAD_DIM[q.dtype]):
        dims = f"head dims {q.shape[-1]} and {v.shape[-1]}"
        return f"{dims} in {q.dtype}; the kernel takes up to {largest}"
    if options.scale == 0:
        return "scale is 0"
    if not torch_compat.has_triton():
        return "triton is not installed"
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return "the GPU is older than sm_80"
    return None


def backend_of(
    q: Tensor, k: Tensor, v: Tensor, options: Options
) -> tuple[library.Kernel | None, str]:
    """Return (the kernel that eager runs, "") or (None, why the scores are formed in memory)."""
    some = min(q.numel(), k.numel(), v.numel()) > 0
    if some and triton_refuses(q, v, options) is None:
        _, causal, _, *narrower = options
        if any(option is not None for option in narrower):  # window, softcap, documents
            return "triton", ""
        if causal and q.shape[2] != k.shape[2]:
            return "triton", ""  # torch's kernels align causal top-left
        kernel = library.choose(q, k, v, None, causal)
        return library.faster(q, kernel, "triton"), ""
    return choose_kernel(q, k, v, options, plan_of(options, q, k))


OP = core.Op(sdpa, sdpa_reference, FORWARD, BACKWARD, supports, prefers_kernel)
