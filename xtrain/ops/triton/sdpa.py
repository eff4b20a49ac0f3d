"""Attention without forming the scores: launches of the three kernels beside this file.

    sdpa_fwd.py      out, lse             one program per block of queries
    sdpa_bwd_q.py    grad_q, delta        one program per block of queries
    sdpa_bwd_kv.py   grad_k, grad_v       one program per block of keys and group of query heads
    sdpa_tiles.py    what they share; the ranges of keys that a document mask leaves

Each file's docstring has its tiling, bytes and numerics. The formula is in xtrain/ops/sdpa.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xtrain.ops.triton import sdpa_bwd_kv, sdpa_bwd_q
from xtrain.ops.triton import sdpa_fwd as forward
from xtrain.ops.triton.sdpa_tiles import Options, head_block


def _width_and_arch(q: Tensor, v: Tensor) -> tuple[int, int, int]:
    """Return (wider head block, bytes per element, family): what block sizes depend on.

    The family of sm_86 is 80: tensor cores are those of the family, and the tiles for it fit the
    smallest shared memory of its members.
    """
    family = 10 * torch.cuda.get_device_capability()[0]
    return max(head_block(q.shape[-1]), head_block(v.shape[-1])), q.element_size(), family


def sdpa_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    options: Options,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Write out and lse.

    Shapes:  q (B, N, T, H); k (B, M, S, H); v (B, M, S, HV); documents (B, T), int, or None; out
             (B, N, T, HV), dense rows; lse (B, N, T), fp32, contiguous. No size is 0.
    """
    blocks = forward.sdpa_fwd_block_sizes(*_width_and_arch(q, v))
    forward.sdpa_fwd(q, k, v, documents, options, out, lse, blocks=blocks)


def sdpa_bwd(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    out: Tensor,
    lse: Tensor,
    options: Options,
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Write grads = (grad_q, grad_k, grad_v), dense rows; shapes as for `sdpa_fwd`."""
    grad_q, grad_k, grad_v = grads
    what = _width_and_arch(q, v)
    lse = lse.contiguous()
    blocks = sdpa_bwd_q.sdpa_bwd_q_block_sizes(*what)
    delta = sdpa_bwd_q.sdpa_bwd_q(
        grad_out, q, k, v, documents, out, lse, options, grad_q, blocks=blocks
    )
    blocks = sdpa_bwd_kv.sdpa_bwd_kv_block_sizes(*what)
    sdpa_bwd_kv.sdpa_bwd_kv(
        grad_out, q, k, v, documents, lse, delta, options, grad_k, grad_v, blocks=blocks
    )
