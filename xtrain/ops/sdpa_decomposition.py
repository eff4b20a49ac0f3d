"""How attention is computed: a library kernel where one provably serves, else matmul and softmax.

The formula and its conventions are in sdpa.py, whose op these functions decompose. A kernel serves
when it gives what the formula says for every value of the inputs: rows that see nothing, additive
masks of any finite size, and queries that are not as many as the keys are where they differ.

Letters: B batch, N query heads, M KV heads, G = N / M, T query length, S key length, H head dim.
"""

from __future__ import annotations

import logging
import math
from functools import cache

import torch
from torch import Tensor

from xtrain.ops import attention_kernels
from xtrain.ops.layout import empty_in, memory_order

logger = logging.getLogger(__name__)

# (bias, rows that see nothing, is_causal): see `plan_of`
Plan = tuple[Tensor | None, Tensor | None, bool]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return c: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_in_layout(x: Tensor, last: int) -> Tensor:
    """Return memory for [B, N, T, last] in x's order.

    empty_like would not do: on empty and overlapping tensors its strides differ between real and
    fake ones.
    """
    return empty_in(memory_order(x), (*x.shape[:3], last), x)


def lse_like(q: Tensor) -> Tensor:
    """Return memory for the log-sum-exp [B, N, T] in c."""
    return torch.empty(q.shape[:3], dtype=compute_dtype(q.dtype), device=q.device)


def _bias_of(
    mask: Tensor | None,
    causal: bool,
    window: int | None,
    documents: Tensor | None,
    q: Tensor,
    k: Tensor,
) -> tuple[Tensor | None, Tensor | None]:
    """Return (bias, sees nothing): additive in c, and the rows [.., T, 1] whose output is 0.

    The bias of such a row is 0: every kernel then finds an ordinary row there, whose output and
    incoming gradient are cleared outside.
    """
    T, S, c = q.shape[2], k.shape[2], compute_dtype(q.dtype)
    sees = mask if mask is not None and mask.dtype == torch.bool else None
    if causal:
        last = torch.arange(T, device=q.device)[:, None] + (S - T)
        j = torch.arange(S, device=q.device)[None, :]
        band = j <= last
        if window is not None:
            band = band & (j > last - window)
        sees = band if sees is None else sees & band
    if documents is not None:
        same = documents[:, None, :, None] == documents[:, None, None, :]
        sees = same if sees is None else sees & same
    if mask is not None and mask.dtype != torch.bool:
        bias = mask.to(c)
        if sees is not None:
            bias = torch.where(sees, bias, -math.inf)
    elif sees is not None:
        bias = torch.where(sees, 0.0, -math.inf).to(c)
    else:
        return None, None
    bias = bias[(None,) * (4 - bias.dim())]
    if bias.shape[-1] != S:
        bias = bias.expand(*bias.shape[:-1], S)
    empty = (bias == -math.inf).all(-1, keepdim=True)
    return bias.masked_fill(empty, 0.0), empty


def plan_of(
    mask: Tensor | None,
    causal: bool,
    window: int | None,
    documents: Tensor | None,
    q: Tensor,
    k: Tensor,
) -> Plan:
    """Return (bias, empty, is_causal), leaving to is_causal what a kernel does by itself."""
    T, S = q.shape[2], k.shape[2]
    if window is not None and window >= S:
        window = None
    if causal and window is None:
        if T == 1 and S > 0:
            causal = False  # one query sees every key
        elif mask is None and documents is None and T == S:
            return None, None, True
    bias, empty = _bias_of(mask, causal, window, documents, q, k)
    return bias, empty, False


def choose_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    plan: Plan,
    softcap: float | None,
    *,
    backward: bool = False,
) -> tuple[attention_kernels.Kernel | None, str]:
    """Return (the library kernel to use, "") or (None, why the scores are formed here)."""
    bias, _, is_causal = plan
    float_mask = mask is not None and mask.dtype != torch.bool
    if softcap is not None:
        return None, "softcap is known to no library kernel"
    if float_mask and backward:
        # Kernels rebuild softmax as exp(score - lse). Where a row's mask is a huge finite number,
        # lse absorbs log(count), and the gradient is wrong by that factor.
        return None, "the gradient under a float mask needs the softmax itself"
    if float_mask and q.device.type != "cpu":
        return None, "GPU kernels scale the mask by log2(e), which overflows at finite minima"
    kernel = attention_kernels.choose(q, k, v, bias, is_causal)
    if kernel is None:
        shape = f"head dims {q.shape[-1]} and {v.shape[-1]}"
        return None, f"no library kernel takes {q.dtype}, {shape}, on {q.device.type}"
    return kernel, ""


def _chosen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    plan: Plan,
    softcap: float | None,
    *,
    backward: bool = False,
) -> attention_kernels.Kernel | None:
    kernel, reason = choose_kernel(q, k, v, mask, plan, softcap, backward=backward)
    grouped = bool(q.shape[1] != k.shape[1])
    if kernel is None and (grouped or q.device.type != "cpu") and q.numel() > 0:
        _notice(reason, str(q.dtype), grouped)
    return kernel


@cache
def _notice(reason: str, dtype: str, grouped: bool) -> None:
    """Say once per reason that the form with the most memory runs."""
    heads = ", grouped heads" if grouped else ""
    logger.warning("sdpa forms the [T, S] scores in memory (%s%s): %s", dtype, heads, reason)


def _scores(
    q: Tensor, k: Tensor, bias: Tensor | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Return the biased scores [B, N, T, S] in c, and tanh of the capped ones if there is a cap."""
    c = compute_dtype(q.dtype)
    scores = _grouped(q.to(c), k) @ k.to(c).transpose(-1, -2)
    scores = scores.reshape(*q.shape[:3], k.shape[2]) * scale
    tanh = None
    if softcap is not None:
        tanh = torch.tanh(scores / softcap)
        scores = tanh * softcap
    return (scores if bias is None else scores + bias), tanh


def _grouped(x: Tensor, kv: Tensor) -> Tensor:
    """[B, N, T, ..] as [B, M, G * T, ..]: the queries that share a KV head follow each other."""
    B, N, T, last = x.shape
    M = kv.shape[1]
    return x.reshape(B, M, N // M * T, last)


def sdpa_decomposition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    window: int | None,
    softcap: float | None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse [B, N, T] in c) through a library kernel where one serves."""
    plan = bias, empty, is_causal = plan_of(mask, causal, window, documents, q, k)
    kernel = _chosen(q, k, v, mask, plan, softcap)
    if kernel is not None:
        out, lse = attention_kernels.forward(kernel, q, k, v, bias, is_causal, scale)
    else:
        if is_causal:
            bias, _ = _bias_of(mask, causal, None, documents, q, k)
        scores, _ = _scores(q, k, bias, scale, softcap)
        lse = torch.logsumexp(scores, dim=-1)
        probabilities = torch.softmax(scores, dim=-1)
        out = _grouped(probabilities, k) @ v.to(scores.dtype)
        out = out.reshape(*q.shape[:3], v.shape[-1]).to(q.dtype)
    return (out if empty is None else out.masked_fill(empty, 0.0)), lse


def sdpa_backward_decomposition(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    window: int | None,
    softcap: float | None,
    need_mask_grad: bool,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and of a float mask (empty where not needed)."""
    plan = bias, empty, is_causal = plan_of(mask, causal, window, documents, q, k)
    if empty is not None:
        grad_out = grad_out.masked_fill(empty, 0.0)
    kernel = _chosen(q, k, v, mask, plan, softcap, backward=True)
    if kernel is not None:
        grads = attention_kernels.backward(
            kernel, grad_out, q, k, v, bias, out, lse, is_causal, scale
        )
        return (*grads, q.new_empty(0))
    if is_causal:
        bias, _ = _bias_of(mask, causal, None, documents, q, k)
    return _explicit_backward(
        grad_out, q, k, v, mask if need_mask_grad else None, bias, scale, softcap
    )


def _explicit_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scores, tanh = _scores(q, k, bias, scale, softcap)
    c = scores.dtype
    probabilities = torch.softmax(scores, dim=-1)
    grouped_grad = _grouped(grad_out.to(c), k)
    grad_v = _grouped(probabilities, k).transpose(-1, -2) @ grouped_grad
    grad_p = (grouped_grad @ v.to(c).transpose(-1, -2)).reshape(probabilities.shape)
    grad_p = probabilities * grad_p
    grad_scores = grad_p - probabilities * grad_p.sum(-1, keepdim=True)
    grad_mask = q.new_empty(0) if mask is None else grad_scores.sum_to_size(mask.shape)
    if tanh is not None:
        grad_scores = grad_scores * (1.0 - tanh * tanh)
    grouped_scores = _grouped(grad_scores, k) * scale
    grad_q = (grouped_scores @ k.to(c)).reshape(q.shape)
    grad_k = grouped_scores.transpose(-1, -2) @ _grouped(q.to(c), k)
    if mask is not None:
        grad_mask = grad_mask.to(mask.dtype)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), grad_mask
