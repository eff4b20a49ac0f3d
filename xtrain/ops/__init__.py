"""The ops of xtrain: public functions, and OPS, the table that tests and benchmarks iterate over.

Each op lives in a contract file of its name (formula, reference, registration, public function);
its Triton kernels in `xtrain/ops/triton/` under the same name, imported when first launched. What
ops of one kind share (gated.py) has its kernels under its own.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from xtrain import torch_compat
from xtrain.ops.cross_entropy import OP as CROSS_ENTROPY
from xtrain.ops.cross_entropy import cross_entropy
from xtrain.ops.dropout import OP as DROPOUT
from xtrain.ops.dropout import dropout, dropout_mask
from xtrain.ops.dropout_add_rms_norm import OP as DROPOUT_ADD_RMS_NORM
from xtrain.ops.dropout_add_rms_norm import dropout_add_rms_norm
from xtrain.ops.geglu import OP as GEGLU
from xtrain.ops.geglu import OP_PACKED as GEGLU_PACKED
from xtrain.ops.geglu import geglu
from xtrain.ops.linear_cross_entropy import OP as LINEAR_CROSS_ENTROPY
from xtrain.ops.linear_cross_entropy import linear_cross_entropy
from xtrain.ops.registry import Op
from xtrain.ops.rms_norm import OP as RMS_NORM
from xtrain.ops.rms_norm import rms_norm
from xtrain.ops.rope import OP as ROPE
from xtrain.ops.rope import OP_QK as ROPE_QK
from xtrain.ops.rope import rope, rope_qk
from xtrain.ops.sdpa import OP as SDPA
from xtrain.ops.sdpa import sdpa
from xtrain.ops.swiglu import OP as SWIGLU
from xtrain.ops.swiglu import OP_PACKED as SWIGLU_PACKED
from xtrain.ops.swiglu import swiglu

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

_TABLE = (
    DROPOUT,
    DROPOUT_ADD_RMS_NORM,
    RMS_NORM,
    ROPE,
    ROPE_QK,
    SDPA,
    SWIGLU,
    SWIGLU_PACKED,
    GEGLU,
    GEGLU_PACKED,
    CROSS_ENTROPY,
    LINEAR_CROSS_ENTROPY,
)
OPS: dict[str, Op] = {op.name: op for op in _TABLE}


def _source_hash() -> str:
    """Return a hash of the code that inductor may have compiled into kernels cached on disk."""
    folders = [Path(module).parent for module in (__file__, torch_compat.__file__)]
    sources = [path for folder in folders for path in sorted(folder.glob("*.py"))]
    return sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


torch_compat.add_compile_cache_tag(f"xtrain.ops-{_source_hash()}")
