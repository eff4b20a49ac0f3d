"""OPS, the table that tests, benchmarks and passes iterate over and look ops up in."""

from __future__ import annotations

from xtrain.ops.core import Op
from xtrain.ops.cross_entropy.op import OP as CROSS_ENTROPY
from xtrain.ops.dropout.op import OP as DROPOUT
from xtrain.ops.dropout_add_rms_norm.op import OP as DROPOUT_ADD_RMS_NORM
from xtrain.ops.gated.op import OPS as GATED
from xtrain.ops.linear_cross_entropy.op import OP as LINEAR_CROSS_ENTROPY
from xtrain.ops.rms_norm.op import OP as RMS_NORM
from xtrain.ops.rope.op import OP as ROPE
from xtrain.ops.rope.op import OP_QK as ROPE_QK
from xtrain.ops.sdpa.op import OP as SDPA

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
