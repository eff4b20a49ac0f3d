"""sdpa on CUDA: the choice between torch's kernels and ours, and the call of ours.

The kernels are in xtrain/ops/triton/sdpa.py, torch's behind xtrain/ops/attention_kernels.py, the
formula in xtrain/ops/sdpa.py.

Letters: B batch, N query heads, M KV heads, T query length, S key length, H head dim.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from xtrain import torch_compat
from xtrain.ops import attention_kernels
from xtrain.ops.sdpa_decomposition import choose_kernel, empty_in_layout, lse_like, plan_of

# In 16 bits wider tiles leave no room for two operands in shared memory. fp32 is multiplied in
# parts (tf32x3), whose error was 0.8 of twice plain PyTorch's at head dim 192 and 1.3 at 256.
LARGEST_HEAD_DIM = {torch.bfloat16: 256, torch.float16: 256, torch.float32: 128}


def triton_refuses(q: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> str | None:
    """Return why our kernel cannot take these inputs, or None when it can."""
    if not q.is_cuda:
        return f"tensors are on {q.device.type}, the kernel runs on cuda"
    if mask is not None:
        return "a mask tensor is given; the kernel takes causal, window and documents"
    if q.dtype not in LARGEST_HEAD_DIM:
        return f"tensors are {q.dtype}; the kernel takes bf16, fp16 and fp32"
    if max(q.shape[-1], v.shape[-1]) > (largest := LARGEST_HEAD_DIM[q.dtype]):
        dims = f"head dims {q.shape[-1]} and {v.shape[-1]}"
        return f"{dims} in {q.dtype}; the kernel takes up to {largest}"
    if scale == 0:
        return "scale is 0"
    if not torch_compat.has_triton():
        return "triton is not installed"
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return "the GPU is older than sm_80"
    return None


def backend_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    window: int | None,
    softcap: float | None,
    documents: Tensor | None,
) -> tuple[attention_kernels.Kernel | None, str]:
    """Return (the kernel that eager runs, "") or (None, why the scores are formed in memory)."""
    some = min(q.numel(), k.numel(), v.numel()) > 0
    if some and triton_refuses(q, v, mask, scale) is None:
        if window is not None or softcap is not None or documents is not None:
            return "triton", ""
        if causal and q.shape[2] != k.shape[2]:
            return "triton", ""  # torch's kernels align causal top-left
        kernel = attention_kernels.choose(q, k, v, None, causal)
        return attention_kernels.faster(q, kernel, "triton"), ""
    plan = plan_of(mask, causal, window, documents, q, k)
    return choose_kernel(q, k, v, mask, plan, softcap)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    causal: bool,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) by our kernel."""
    out, lse = empty_in_layout(q, v.shape[3]), lse_like(q)
    kernels, options = _kernels(k, causal, scale, window, softcap)
    kernels.sdpa_fwd(q, k, v, documents, options, out, lse)
    return out, lse


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (grad_q, grad_k, grad_v) by our kernels; out and lse from any backend."""
    grad_q, grad_k, grad_v = (empty_in_layout(x, x.shape[3]) for x in (q, k, v))
    kernels, options = _kernels(k, causal, scale, window, softcap)
    grads = (grad_q, grad_k, grad_v)
    kernels.sdpa_bwd(grad_out, q, k, v, documents, out, lse, options, grads)
    return grads


def _kernels(
    k: Tensor, causal: bool, scale: float, window: int | None, softcap: float | None
) -> tuple[Any, Any]:
    kernels = import_module("xtrain.ops.triton.sdpa")
    if window is not None and window >= k.shape[2]:
        window = None  # no query is further from a key; also, the kernel adds in 32 bits
    return kernels, kernels.Options(causal, scale, window, softcap)
