"""Bodies that no graph shows, of autograd.Functions and of other libraries' ops.

A residual sum in one is an error that names op and line; a body without one runs.
"""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from branch_oracle import (
    SEED,
    Block,
    D,
    P,
    Stack,
    both,
    drop,
    hold,
    made,
    marking,
    x,
)

import xtrain
from xtrain.compiler import SiteError


class StepInFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, up, down):
        ctx.save_for_backward(x, up, down)
        return x + F.linear(F.linear(x, up), down)

    @staticmethod
    def backward(ctx, grad):
        x, up, down = ctx.saved_tensors
        flat, rows = grad.flatten(0, 1), x.flatten(0, 1)
        return grad + grad @ down @ up, down.T @ flat.T @ rows, flat.T @ F.linear(rows, up)


class InFunction(Block):
    def forward(self, x):
        x = x + drop(self.attention(self.norm(x)), self, "attention")
        if marking():
            return x + drop(F.linear(F.linear(x, self.up.weight), self.down.weight), self)
        return StepInFunction.apply(x, self.up.weight, self.down.weight)


def library_op(schema, key="CPU"):
    """Make a function the kernel of an op of its name; its gradients are those of the function."""

    def register(function):
        LIBRARY.define(f"{function.__name__}{schema}")
        LIBRARY.impl(function.__name__, function, key)
        name = f"test_account::{function.__name__}"
        if key == "CPU":
            torch.library.register_fake(name, function)
        if "!" not in schema:

            def backward(ctx, *grads):
                with torch.enable_grad():
                    inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
                    return torch.autograd.grad(function(*inputs), inputs, grads)

            def keep(ctx, inputs, output):
                ctx.save_for_backward(*inputs)

            torch.library.register_autograd(name, backward, setup_context=keep)
        op = getattr(torch.ops.test_account, function.__name__)
        KERNELS[op] = function
        return op

    return register


KERNELS = {}
LIBRARY = torch.library.Library("test_account", "FRAGMENT")


@library_op("(Tensor x, Tensor up, Tensor down) -> Tensor", "CompositeExplicitAutograd")
def step_in_op(x, up, down):
    return x + F.linear(F.linear(x, up), down)


@library_op("(Tensor x, Tensor weight) -> Tensor")
def norm_op(x, weight):
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * weight


@library_op("(Tensor x, Tensor up, Tensor down) -> Tensor")
def gated_mlp_op(x, up, down):
    out = torch.empty_like(x)
    out.copy_(F.linear(x, up)[..., :D].sigmoid() * F.linear(x, down.mT)[..., :D])
    return out


@library_op("(Tensor x, Tensor h, Tensor weight) -> (Tensor, Tensor)")
def add_and_norm_op(x, h, weight):
    x = x + h
    return norm_op(x, weight), x.clone()


@library_op("(Tensor(a!) x, Tensor h, Tensor weight) -> ()")
def add_into_op(x, h, weight):
    x.add_(h * weight)


@library_op("(Tensor x, Tensor up, Tensor down) -> Tensor")
def outer_op(x, up, down):
    return step_in_op(x, up, down) * 1.0


@torch.library.custom_op("test_account::numpy_op", mutates_args=())
def numpy_op(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy() + (x @ up.mT @ down.mT).numpy())


numpy_op.register_fake(lambda x, up, down: torch.empty_like(x))


@torch.library.custom_op("test_account::numpy_pair", mutates_args=())
def numpy_pair(x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(x.numpy() * 2), torch.from_numpy(x.numpy() + h.numpy())


numpy_pair.register_fake(lambda x, h: (torch.empty_like(x), torch.empty_like(x)))


@torch.library.custom_op("test_account::numpy_write", mutates_args=("x",))
def numpy_write(x: torch.Tensor, h: torch.Tensor) -> None:
    x.numpy()[:] += h.numpy()


class InOp(InFunction):
    """The second step of a block by `apply`; marked in plain code."""

    def apply(self, x):
        return step_in_op(x, self.up.weight, self.down.weight)

    def forward(self, x):
        return super().forward(x) if marking() else self.apply(x + self.attention(self.norm(x)))


class InOuterOp(InOp):
    def apply(self, x):
        return outer_op(x, self.up.weight, self.down.weight)


class InNormOp(InOp):
    def apply(self, x):
        h = F.linear(F.linear(x, self.up.weight), self.down.weight)
        return add_and_norm_op(x, h, self.norm.weight)[1]


class InPlaceOp(InOp):
    def apply(self, x):
        x = x * 1.0
        add_into_op(x, F.linear(F.linear(x, self.up.weight), self.down.weight), x.new_ones(1))
        return x


class InEagerOp(InOp):
    @torch.compiler.disable
    def apply(self, x):
        return step_in_op(x, self.up.weight, self.down.weight)


class InNumpyOp(InOp):
    def apply(self, x):
        return numpy_op(x, self.up.weight, self.down.weight)


class InNumpyPair(InOp):
    def apply(self, x):
        return numpy_pair(x, F.linear(F.linear(x, self.up.weight), self.down.weight))[1]


class InNumpyWrite(InOp):
    def apply(self, x):
        x = x * 1.0
        numpy_write(x, F.linear(F.linear(x, self.up.weight), self.down.weight))
        return x


class InCppOp(InOp):
    def apply(self, x):
        weight = self.up.weight[:D].detach()
        return torch.ops.mkldnn._linear_pointwise(x.detach(), weight, None, "none", [], "")


@both
def test_a_whole_step_in_an_autograd_function(compile_it):
    hold(Stack, compile_it, InFunction, must_run=False)


@both
@pytest.mark.parametrize(
    ("block", "body"),
    [
        (InOp, "step_in_op"),
        (InOuterOp, "step_in_op"),
        (InNormOp, "add_and_norm_op"),
        (InPlaceOp, "add_into_op"),
        (InEagerOp, "step_in_op"),
    ],
)
def test_a_sum_in_the_body_of_a_library_op_is_named(block, body, compile_it):
    error = hold(Stack, compile_it, block, must_run=False)
    assert error is not None
    text = str(error)
    assert re.search(rf"body of test_account.\w+ adds at \S+:\d+ in {body}, `.*\bx\b", text)
    assert re.search(r"sums=\{'[^']+': 'leave'\}", text)


@both
@pytest.mark.parametrize(
    ("block", "why"),
    [
        (InNumpyOp, r"numpy_op is not seen \(run without data it raises .*numpy"),
        (InNumpyPair, "numpy_pair is not seen"),
        (InNumpyWrite, "numpy_write is not seen"),
        (InCppOp, r"_linear_pointwise is not seen \(its CPU kernel is no Python code\)"),
    ],
)
def test_a_library_op_whose_body_cannot_be_seen_is_refused(block, why, compile_it):
    error = hold(Stack, compile_it, block, must_run=False)
    assert error is not None
    assert re.search(rf"op at \S+:\d+.*{why}.*sums=\{{'[^']+': 'leave'\}}", str(error)), error


class WithOps(Block):
    """Post-norm by one op, the branch by another: nothing in them adds to the stream."""

    def forward(self, x):
        x = norm_op(x + drop(self.attention(x), self, "attention"), self.norm.weight)
        h = gated_mlp_op(x, self.up.weight, self.down.weight)
        return norm_op(x + drop(h, self), self.norm2.weight)


class WithEagerOps(WithOps):
    @torch.compiler.disable(recursive=False)
    def last(self, x):
        return norm_op(x, self.norm2.weight)

    def forward(self, x):
        return self.last(x + drop(self.mlp(self.norm(x)), self))


@both
@pytest.mark.parametrize("block", [WithOps, WithEagerOps])
def test_library_ops_that_add_nothing_to_the_stream_run(block, compile_it):
    hold(Stack, compile_it, block)


def test_the_look_into_an_op_guards_no_sizes():
    """Its sizes are symbols, and what its body asks of them makes no other batch compile anew."""
    model = made(Stack, WithOps)()
    compiled = xtrain.compile(model, dropout=P, seed=SEED, backend="eager", dynamic=True)
    for batch, length in ((2, 6), (3, 8), (5, 7)):
        compiled(torch.randn(batch, length, D))
    assert compiled.report().num_train_graphs == 1
    with pytest.raises(SiteError, match="body of test_account"):
        xtrain.compile(made(Stack, InOp)(), dropout=P, backend="eager", dynamic=True)(x())


@pytest.mark.parametrize("code", [InOp.apply, step_in_op])
def test_a_sum_in_an_op_is_settled_by_the_line_of_the_add_or_the_call(code):
    code = KERNELS.get(code, code)
    line = inspect.getsource(code).count("\n") + inspect.getsourcelines(code)[1] - 1
    place = f"test_compile_bodies.py:{line}"
    keywords = {"dropout": P, "seed": SEED, "backend": "eager"}
    compiled = xtrain.compile(made(Stack, InOp)(), **keywords, sums={place: "leave"})
    compiled(x())
    assert [s.site for s in compiled.last_executed_sites] == ["attention"] * 2
    with pytest.raises(SiteError, match="where no pass can put dropout"):
        xtrain.compile(made(Stack, InOp)(), **keywords, sums={place: "drop"})(x())


# --- what is done past torch's ops, in eager code and in graphs -----------------------------------


class HostKernel(triton.runtime.jit.KernelInterface):
    """Launched like a Triton kernel; writes into the memory it is given, past torch."""

    def __init__(self, function):
        self.fn = function

    def run(self, *tensors, grid, warmup):
        self.fn(*(t.detach().numpy() for t in tensors))


@HostKernel
def step_kernel(x, up, down, out):
    out[:] = x + x @ up.T @ down.T


@HostKernel
def add_kernel(h, x):
    x += h


@HostKernel
def tanh_kernel(h, out):
    np.tanh(h, out=out)


class StepByKernel(StepInFunction):
    @staticmethod
    def forward(ctx, x, up, down):
        ctx.save_for_backward(x, up, down)
        out = torch.empty_like(x)
        step_kernel[1,](x, up, down, out)
        return out


class StepInMemory(StepByKernel):
    @staticmethod
    def forward(ctx, x, up, down):
        ctx.save_for_backward(x, up, down)
        out = torch.empty_like(x)
        step_kernel.fn(*(t.detach().numpy() for t in (x, up, down, out)))
        return out


class StepByNumpy(StepByKernel):
    @staticmethod
    def forward(ctx, x, up, down):
        ctx.save_for_backward(x, up, down)
        y, w, v = (t.detach().numpy() for t in (x, up, down))
        return torch.from_numpy(y + y @ w.T @ v.T) * 1.0


class AddByKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, h):
        x = x.clone()
        add_kernel[1,](h, x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, grad


class TanhByKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        out = torch.empty_like(h)
        tanh_kernel[1,](h, out)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        return grad * (1 - out**2)


class InEagerKernel(InOp):
    step = StepByKernel

    @torch.compiler.disable
    def apply(self, x):
        return self.step.apply(x, self.up.weight, self.down.weight)


class InEagerMemory(InEagerKernel):
    step = StepInMemory


class InEagerNumpy(InEagerKernel):
    step = StepByNumpy


class InEagerAdd(InOp):
    @torch.compiler.disable
    def apply(self, x):
        return AddByKernel.apply(x, F.linear(F.linear(x, self.up.weight), self.down.weight))


@triton.jit
def add_on_gpu(x, h, out, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(out + at, tl.load(x + at) + tl.load(h + at))


class InTritonKernel(InOp):
    def apply(self, x):
        out = torch.zeros_like(x)
        h = F.linear(F.linear(x, self.up.weight), self.down.weight)
        add_on_gpu[1,](x, h, out, 16)
        return out


@both
@pytest.mark.parametrize(
    ("block", "why"),
    [
        (InEagerKernel, r"the body of step_kernel is not seen \(a Triton kernel\)"),
        (InEagerAdd, r"the body of add_kernel is not seen \(a Triton kernel\)"),
        (InEagerMemory, "its memory was filled past torch's ops"),
        (InEagerNumpy, "what StepByNumpy returned was made past torch's ops"),
    ],
)
def test_what_is_done_past_torch_is_refused(block, why, compile_it):
    error = hold(Stack, compile_it, block, must_run=False)
    assert error is not None
    assert re.search(rf"op at \S+:\d+.*{why}.*sums=\{{'[^']+': 'leave'\}}", str(error)), error


class WithEagerKernel(Block):
    """A kernel on the stream alone, and memory that is filled part by part: no sum in either."""

    @torch.compiler.disable
    def last(self, x):
        out = torch.empty_like(x)
        for i, value in enumerate(TanhByKernel.apply(x)):
            out[i] = value
        return out

    def forward(self, x):
        return self.last(x + drop(self.mlp(self.norm(x)), self))


@both
def test_a_kernel_that_adds_nothing_to_the_stream_runs(compile_it):
    hold(Stack, compile_it, WithEagerKernel)


@pytest.mark.gpu
def test_a_triton_kernel_in_a_graph_is_refused():
    model = made(Stack, InTritonKernel)().cuda()
    line = inspect.getsourcelines(InTritonKernel.apply)[1] + 3
    place = f"test_compile_bodies.py:{line}"
    keywords = {"dropout": P, "seed": SEED, "backend": "eager"}
    with pytest.raises(SiteError, match="the body of add_on_gpu is not seen") as error:
        xtrain.compile(model, **keywords)(x().cuda())
    assert place in str(error.value)
    compiled = xtrain.compile(model, **keywords, sums={place: "leave"})
    compiled(x().cuda())
    assert [s.site for s in compiled.last_executed_sites] == ["attention"] * 2
