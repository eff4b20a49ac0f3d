"""The ops of xtrain: public functions, and OPS, the table that tests and benchmarks iterate over.

    core.py      how an op is made: schema, fake, eager and CUDA kernels, lowering, derivative
    <op>/        op.py: formula, reference, decomposition, derivative, public function; kernel.py:
                 its Triton kernels, imported when first launched. gated/ has swiglu and geglu;
                 linear_cross_entropy/ works by the rows of cross_entropy/, dropout_add_rms_norm/
                 by the kernels of rms_norm/
    shared/      memory layouts; rows, casts and random words of kernels; the helper for CPUs
    launch.py    how kernels are launched, and how compiled code does so at less cost to the host

Imports go one way: op.py to core, shared and the ops that it is made of; kernels to shared and
launch.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from xtrain import torch_compat
from xtrain.ops.core import Op
from xtrain.ops.cross_entropy.op import OP as CROSS_ENTROPY
from xtrain.ops.cross_entropy.op import cross_entropy
from xtrain.ops.dropout.op import OP as DROPOUT
from xtrain.ops.dropout.op import dropout, dropout_mask
from xtrain.ops.dropout_add_rms_norm.op import OP as DROPOUT_ADD_RMS_NORM
from xtrain.ops.dropout_add_rms_norm.op import dropout_add_rms_norm
from xtrain.ops.gated.op import OPS as GATED
from xtrain.ops.gated.op import geglu, swiglu
from xtrain.ops.linear_cross_entropy.op import OP as LINEAR_CROSS_ENTROPY
from xtrain.ops.linear_cross_entropy.op import linear_cross_entropy
from xtrain.ops.rms_norm.op import OP as RMS_NORM
from xtrain.ops.rms_norm.op import rms_norm
from xtrain.ops.rope.op import OP as ROPE
from xtrain.ops.rope.op import OP_QK as ROPE_QK
from xtrain.ops.rope.op import rope, rope_qk
from xtrain.ops.sdpa.op import OP as SDPA
from xtrain.ops.sdpa.op import sdpa

__all__ = [
    "OPS",
    "Op",
    "cross_entropy",
    "dropout",
    "dropout_add_rms_norm",
    "dropout_mask",
    "geglu",
    "linear_cross_entropy",
    "rms_norm",
    "rope",
    "rope_qk",
    "sdpa",
    "swiglu",
]


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        DROPOUT,
        DROPOUT_ADD_RMS_NORM,
        RMS_NORM,
        ROPE,
        ROPE_QK,
        SDPA,
        *GATED,
        CROSS_ENTROPY,
        LINEAR_CROSS_ENTROPY,
    )
}


def _source_hash() -> str:
    """Return a hash of the code that inductor may have compiled into kernels cached on disk."""
    folders = [Path(module).parent for module in (__file__, torch_compat.__file__)]
    sources = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


torch_compat.add_compile_cache_tag(f"xtrain.ops-{_source_hash()}")
