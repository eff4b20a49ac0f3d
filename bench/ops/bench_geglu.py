"""xtrain.ops.geglu and geglu_packed against gelu(gate) * up and Liger, at swiglu's sizes.

By erf and by tanh; Liger has the latter alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from bench.ops import bench_swiglu
from bench.ops.bench_swiglu import make_inputs, num_bytes, num_flops, of_operands
from bench.ops.common import (
    COPY,
    EAGER,
    INDUCTOR,
    LIGER,
    OUR_ERROR_FACTOR,
    OURS,
    SEE_THROUGH,
    Case,
    Inputs,
    NotThere,
    Provider,
    Target,
    compiled_provider,
    decomposed,
    liger,
    never_slower,
    our_op,
    truth_by,
)

__all__ = ["make_inputs", "num_bytes", "num_flops"]

OP, PACKED = "geglu", "geglu_packed"
QUESTION = "Is GeGLU at the memory limit, by tanh and by erf, its operands apart or packed?"
MODES = ("forward", "both")
CASES = {
    device: [
        replace(case, name=f"{case.name}, {label}", options={**case.options, "approximate": value})
        for case in cases
        for label, value in (("tanh", "tanh"), ("erf", "none"))
    ]
    for device, cases in bench_swiglu.CASES.items()
}


def plain(case: Case) -> Callable[..., Tensor]:
    approximate = case.options["approximate"]
    return of_operands(lambda gate, up: F.gelu(gate, approximate=approximate) * up)


def seen_through(case: Case) -> Callable[..., Tensor]:
    approximate = case.options["approximate"]
    if case.options["packed"]:
        forward = our_op(PACKED).forward
        return lambda gate_up: forward(gate_up, "gate_up", approximate)
    forward = our_op(OP).forward
    return lambda gate, up: forward(gate, up, approximate)


def ours(case: Case) -> Callable[..., Tensor]:
    public = our_op(PACKED if case.options["packed"] else OP).public
    return lambda *args: public(*args, approximate=case.options["approximate"])


def ligers(case: Case) -> Callable[..., Tensor]:
    if case.options["approximate"] != "tanh":
        raise NotThere("Liger's GELU is the tanh approximation")
    return of_operands(liger("geglu", "LigerGELUMulFunction").apply)


PROVIDERS = {
    EAGER: Provider(plain),
    INDUCTOR: compiled_provider(plain),
    SEE_THROUGH: compiled_provider(seen_through, error_factor=OUR_ERROR_FACTOR),
    OURS: Provider(ours, error_factor=OUR_ERROR_FACTOR),
    LIGER: Provider(ligers, mutates=True),  # its backward writes over gate and up
}
TARGETS = [
    Target("at least 92% of copy's bandwidth", 1 / 0.92, COPY, cases=(case.name,))
    for case in CASES["cuda"]
] + never_slower()


def truth(case: Case, inputs: Inputs) -> list[Tensor]:
    return truth_by(plain(case), inputs)


def form(case: Case, inputs: Inputs) -> str:
    return decomposed(our_op(PACKED if case.options["packed"] else OP).supports(*inputs.args))
