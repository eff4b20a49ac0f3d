"""torch's fused attention kernels behind one interface: the part of torch_compat about attention.

`aten._scaled_dot_product_*` differ in arguments, in the layout of the log-sum-exp and in what they
accept. Here each takes (q, k, v, bias, is_causal, scale) and gives (out, lse [B, N, T]); its
backward takes that out and lse, in any strides.

Letters: B batch, N query heads, M KV heads, T query length, S key length, H head dim.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Kernel = Literal["cpu_flash", "flash", "cudnn", "efficient", "triton"]

_aten = torch.ops.aten


def choose(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool) -> Kernel | None:
    """Return the fastest of torch's kernels that serve these inputs, or None when none does.

    Args:     bias: additive, broadcastable to [B, N, T, S], no row of it -inf throughout.
              is_causal: only with T == S and no bias: torch aligns top-left.
    """
    if min(q.numel(), k.numel()) == 0 or q.shape[-1] != v.shape[-1]:
        return None
    if q.device.type == "cpu":
        return "cpu_flash"
    if q.device.type != "cuda":
        return None
    for kernel in ("efficient",) if bias is not None else _ranking(q):
        if kernel != "triton" and _serves(kernel, q, k, v, bias, is_causal):
            return kernel
    return None


def switches() -> tuple[bool, ...]:
    """Return torch's settings that `choose` goes by, beside its arguments."""
    cuda = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )


def _serves(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool
) -> bool:
    """Return whether torch's `kernel` takes these inputs on this GPU, switches included.

    It asks about shapes and strides, not values: views stand for what `forward` would copy.
    """
    grouped = q.shape[1] != k.shape[1]
    if kernel == "efficient":  # knows no grouped heads: see _expand
        heads, length = q.shape[1], k.shape[2]
        k, v = (x[:, :1].expand(-1, heads, -1, -1) if grouped else x for x in (k, v))
        grouped = False
        if bias is not None:
            row = q.new_empty(1, 1, 1, length + -length % 16)[..., :length]
            bias = row.expand(*q.shape[:3], length)
    params = torch.backends.cuda.SDPAParams(q, k, v, bias, 0.0, is_causal, grouped)
    return {
        "flash": torch.backends.cuda.can_use_flash_attention,
        "cudnn": torch.backends.cuda.can_use_cudnn_attention,
        "efficient": torch.backends.cuda.can_use_efficient_attention,
    }[kernel](params)


def _ranking(q: Tensor) -> tuple[Kernel, ...]:
    """Return the kernels, fastest first, for this GPU, dtype and head dim.

    H200, bf16, causal, B8 H16 S2048 D64, TFLOP/s forward / forward and backward: cuDNN 355 / 314,
    ours 334 / 289, FlashAttention 2 241 / 217. Beyond head dim 128 ours holds fewer rows at a time,
    and FlashAttention 2 was made for the GPUs before sm_90. In fp32 ours multiplies in three parts
    on half the registers: for what torch's cannot do.
    """
    if q.dtype == torch.float32:
        return "efficient", "triton"
    if torch.cuda.get_device_capability(q.device)[0] not in (9, 10):
        return "flash", "cudnn", "triton", "efficient"
    if q.shape[-1] > 128:
        return "cudnn", "flash", "triton", "efficient"
    return "cudnn", "triton", "flash", "efficient"


def faster(q: Tensor, one: Kernel | None, other: Kernel) -> Kernel:
    """Return which of two kernels that both serve is faster; other where one is None."""
    ranking = _ranking(q)
    return other if one is None or ranking.index(other) < ranking.index(one) else one


def forward(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return (out [B, N, T, H], lse [B, N, T], natural logarithm)."""
    q, k, v = _last_dim_dense(q), _last_dim_dense(k), _last_dim_dense(v)
    head_dim = q.shape[-1]
    if kernel == "cpu_flash":
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale
        )
    if kernel == "flash":
        q, k, v = _pad_head_dim(q), _pad_head_dim(k), _pad_head_dim(v)
        out, lse = _aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, is_causal, False, scale=scale
        )[:2]
        return out[..., :head_dim], lse
    if kernel == "cudnn":
        out, lse = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, is_causal, False, scale=scale
        )[:2]
        return out, lse.reshape(q.shape[:3])
    bias = None if bias is None else _efficient_bias(q, k, bias)
    out, lse = _aten._scaled_dot_product_efficient_attention(
        q, _expand(q, k), _expand(q, v), bias, True, 0.0, is_causal, scale=scale
    )[:2]
    return out, lse[..., : q.shape[2]]


def backward(
    kernel: Kernel,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (grad_q, grad_k, grad_v) in the shapes of q, k, v; lse as `forward` gives it."""
    grad_out, q, k, v, out = map(_last_dim_dense, (grad_out, q, k, v, out))
    lse = lse.contiguous()  # the kernels read it row by row whatever its strides say
    head_dim = q.shape[-1]
    if kernel == "cpu_flash":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, is_causal, attn_mask=bias, scale=scale
        )
    # Without dropout the kernels do not read their random state.
    unused = torch.empty((), dtype=torch.int64, device=q.device)
    lengths = (q.shape[2], k.shape[2])
    if kernel == "flash":
        padded = map(_pad_head_dim, (grad_out, q, k, v, out))
        grads = _aten._scaled_dot_product_flash_attention_backward(
            *padded, lse, None, None, *lengths, 0.0, is_causal, unused, unused, scale=scale
        )
        return tuple(grad[..., :head_dim] for grad in grads)
    if kernel == "cudnn":
        # Takes the strides of grad_out for those of out (torch 2.11): wrong values otherwise.
        same_strides = grad_out.stride() == out.stride()
        return _aten._scaled_dot_product_cudnn_attention_backward(
            grad_out if same_strides else torch.empty_like(out).copy_(grad_out),
            q,
            k,
            v,
            out,
            lse.unsqueeze(-1),
            unused,
            unused,
            None,
            None,
            None,
            *lengths,
            0.0,
            is_causal,
            scale=scale,
        )
    padding = -lse.shape[-1] % 32  # the kernel reads lse in rows of 32
    grad_q, grad_k, grad_v, _ = _aten._scaled_dot_product_efficient_attention_backward(
        grad_out,
        q,
        _expand(q, k),
        _expand(q, v),
        None if bias is None else _efficient_bias(q, k, bias),
        out.transpose(1, 2).contiguous().transpose(1, 2),  # the kernel's own order, or wrong values
        F.pad(lse, (0, padding), value=float("inf")),
        unused,
        unused,
        0.0,
        [True, True, True, False],
        is_causal,
        scale=scale,
    )
    return grad_q, _sum_groups(grad_k, k), _sum_groups(grad_v, v)


def _last_dim_dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _pad_head_dim(x: Tensor) -> Tensor:
    """Zeros up to the next multiple of 8, as torch does before its flash kernel."""
    padding = -x.shape[-1] % 8
    return F.pad(x, (0, padding)) if padding else x


def _expand(q: Tensor, kv: Tensor) -> Tensor:
    """Repeat each KV head for its N / M query heads, where a kernel knows no groups."""
    groups = q.shape[1] // kv.shape[1]
    return kv if groups == 1 else kv.repeat_interleave(groups, dim=1)


def _sum_groups(grad: Tensor, kv: Tensor) -> Tensor:
    if grad.shape[1] == kv.shape[1]:
        return grad
    groups = grad.shape[1] // kv.shape[1]
    return grad.unflatten(1, (kv.shape[1], groups)).sum(dim=2)


def _efficient_bias(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    """The bias in q's dtype, rows at multiples of 16 bytes, expanded to [B, N, T, S].

    Only 0 and -inf come here, exact in every dtype.
    """
    length = k.shape[2]
    padded = F.pad(bias.to(q.dtype), (0, -length % 16))[..., :length]
    return padded.expand(q.shape[0], q.shape[1], q.shape[2], length)
