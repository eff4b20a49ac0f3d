"""How attention is computed: a library kernel where one provably serves, else matmul and softmax.

The formula and its conventions are in op.py, whose op these functions decompose. A kernel serves
when it gives what the formula says for every value of the inputs: rows that see nothing, additive
masks of any finite size, and queries that are not as many as the keys are where they differ.

Letters: B batch, N query heads, M KV heads, G = N / M, T query length, S key length, H head dim.
"""

from __future__ import annotations

import logging
import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xtrain.ops.core import compute_dtype
from xtrain.ops.sdpa import library
from xtrain.ops.shared.layout import empty_in, memory_order

logger = logging.getLogger("xtrain.ops.sdpa_decomposition")


class Options(NamedTuple):
    """What is computed: the op's arguments beside q, k and v, in the order of its schema."""

    mask: Tensor | None
    causal: bool
    scale: float
    window: int | None
    softcap: float | None
    documents: Tensor | None = None

    @property
    def has_float_mask(self) -> bool:
        """Whether the mask is one to be added."""
        return self.mask is not None and self.mask.dtype != torch.bool

    def within(self, num_keys: int) -> Options:
        """Return the same without a window that no query is far enough from a key to notice."""
        unseen = self.window is not None and self.window >= num_keys
        return self._replace(window=None) if unseen else self


# (bias, rows that see nothing, is_causal): see `plan_of`
Plan = tuple[Tensor | None, Tensor | None, bool]


def empty_in_layout(x: Tensor, last: int) -> Tensor:
    """Return memory for [B, N, T, last] in x's order.

    empty_like would not do: on empty and overlapping tensors its strides differ between real and
    fake ones.
    """
    return empty_in(memory_order(x), (*x.shape[:3], last), x)


def lse_like(q: Tensor) -> Tensor:
    """Return memory for the log-sum-exp [B, N, T] in c."""
    return torch.empty(q.shape[:3], dtype=compute_dtype(q.dtype), device=q.device)


def _bias_of(options: Options, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return (bias, sees nothing): additive in c, and the rows [.., T, 1] whose output is 0.

    The bias of such a row is 0: every kernel then finds an ordinary row there, whose output and
    incoming gradient are cleared outside.
    """
    T, S, c = q.shape[2], k.shape[2], compute_dtype(q.dtype)
    mask, window, documents = options.mask, options.window, options.documents
    sees = None if options.has_float_mask else mask
    if options.causal:
        last = torch.arange(T, device=q.device)[:, None] + (S - T)
        j = torch.arange(S, device=q.device)[None, :]
        band = j <= last
        if window is not None:
            band = band & (j > last - window)
        sees = band if sees is None else sees & band
    if documents is not None:
        same = documents[:, None, :, None] == documents[:, None, None, :]
        sees = same if sees is None else sees & same
    if mask is not None and options.has_float_mask:
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


def plan_of(options: Options, q: Tensor, k: Tensor) -> Plan:
    """Return (bias, empty, is_causal), leaving to is_causal what a kernel does by itself."""
    T, S = q.shape[2], k.shape[2]
    options = options.within(S)
    if options.causal and options.window is None:
        if T == 1 and S > 0:
            options = options._replace(causal=False)  # one query sees every key
        elif options.mask is None and options.documents is None and T == S:
            return None, None, True
    bias, empty = _bias_of(options, q, k)
    return bias, empty, False


def choose_kernel(
    q: Tensor, k: Tensor, v: Tensor, options: Options, plan: Plan, *, backward: bool = False
) -> tuple[library.Kernel | None, str]:
    """Return (the library kernel to use, "") or (None, why the scores are formed here)."""
    bias, _, is_causal = plan
    float_mask = options.has_float_mask
    if options.softcap is not None:
        return None, "softcap is known to no library kernel"
    if float_mask and backward:
        # Kernels rebuild softmax as exp(score - lse). Where a row's mask is a huge finite number,
        # lse absorbs log(count), and the gradient is wrong by that factor.
        return None, "the gradient under a float mask needs the softmax itself"
    if float_mask and q.device.type != "cpu":
        return None, "GPU kernels scale the mask by log2(e), which overflows at finite minima"
    kernel = library.choose(q, k, v, bias, is_causal)
    if kernel is None:
        shape = f"head dims {q.shape[-1]} and {v.shape[-1]}"
        return None, f"no library kernel takes {q.dtype}, {shape}, on {q.device.type}"
    return kernel, ""


def _noticed(q: Tensor, k: Tensor, choice: tuple[library.Kernel | None, str]) -> Any:
    """Return the kernel of what `choose_kernel` chose; say it where there is none."""
    kernel, reason = choice
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
    q: Tensor, k: Tensor, bias: Tensor | None, options: Options
) -> tuple[Tensor, Tensor | None]:
    """Return the biased scores [B, N, T, S] in c, and tanh of the capped ones if there is a cap."""
    c = compute_dtype(q.dtype)
    scores = _grouped(q.to(c), k) @ k.to(c).transpose(-1, -2)
    scores = scores.reshape(*q.shape[:3], k.shape[2]) * options.scale
    tanh = None
    if options.softcap is not None:
        tanh = torch.tanh(scores / options.softcap)
        scores = tanh * options.softcap
    return (scores if bias is None else scores + bias), tanh


def _grouped(x: Tensor, kv: Tensor) -> Tensor:
    """[B, N, T, ..] as [B, M, G * T, ..]: the queries that share a KV head follow each other."""
    B, N, T, last = x.shape
    M = kv.shape[1]
    return x.reshape(B, M, N // M * T, last)


def sdpa_decomposition(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Return (out, lse [B, N, T] in c) through a library kernel where one serves."""
    plan = bias, empty, is_causal = plan_of(options, q, k)
    kernel = _noticed(q, k, choose_kernel(q, k, v, options, plan))
    if kernel is not None:
        out, lse = library.forward(kernel, q, k, v, bias, is_causal, options.scale)
    else:
        if is_causal:
            bias, _ = _bias_of(options.within(k.shape[2]), q, k)
        scores, _ = _scores(q, k, bias, options)
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
    options: Options,
    out: Tensor,
    lse: Tensor,
    need_mask_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and of a float mask (empty where not needed)."""
    plan = bias, empty, is_causal = plan_of(options, q, k)
    if empty is not None:
        grad_out = grad_out.masked_fill(empty, 0.0)
    kernel = _noticed(q, k, choose_kernel(q, k, v, options, plan, backward=True))
    if kernel is not None:
        grads = library.backward(
            kernel, grad_out, q, k, v, bias, out, lse, is_causal, options.scale
        )
        return (*grads, q.new_empty(0))
    if is_causal:
        bias, _ = _bias_of(options.within(k.shape[2]), q, k)
    mask = options.mask if need_mask_grad else None
    return _explicit_backward(grad_out, q, k, v, mask, bias, options)


def _explicit_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scores, tanh = _scores(q, k, bias, options)
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
    grouped_scores = _grouped(grad_scores, k) * options.scale
    grad_q = (grouped_scores @ k.to(c)).reshape(q.shape)
    grad_k = grouped_scores.transpose(-1, -2) @ _grouped(q.to(c), k)
    if mask is not None:
        grad_mask = grad_mask.to(mask.dtype)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), grad_mask
