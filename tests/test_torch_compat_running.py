"""The contract of torch_compat/running.py: what is asked while a model runs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from xtrain import torch_compat


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_in_backward_is_true_in_a_recompute_and_nowhere_else(use_reentrant):
    seen = []

    def f(x):
        seen.append(torch_compat.in_backward())
        return x.sin() * 2

    x = torch.zeros(3, requires_grad=True)
    y = checkpoint(f, x, use_reentrant=use_reentrant)
    seen.append(torch_compat.in_backward())
    y.sum().backward()
    seen.append(torch_compat.in_backward())
    assert seen == [False, False, True, False]


def test_storage_ref_expires_with_the_memory_not_with_the_tensor():
    x = torch.zeros(3)
    view, ref = x[1:], torch_compat.StorageRef(x)
    del x
    assert not ref.expired(), "a view keeps the memory"
    del view
    assert ref.expired()


def test_writes_are_counted_through_views_and_by_what_shares_the_memory():
    x = torch.zeros(3)
    other = x.detach()
    before = torch_compat.num_writes(x)
    x.add(1)
    assert torch_compat.num_writes(x) == before
    x[1:].mul_(2)
    with torch.no_grad():
        other.add_(1)
    assert torch_compat.num_writes(x) == torch_compat.num_writes(other) == before + 2


def test_inductors_allocation_gives_the_layout_that_is_asked_for(device):
    empty = torch_compat.empty_strided(device.type)
    tensor = empty((2, 3), (1, 2), torch.bfloat16)
    assert tensor.device.type == device.type and tensor.dtype == torch.bfloat16
    assert tensor.shape == (2, 3) and tensor.stride() == (1, 2)
    assert tensor.data_ptr() % 16 == 0


@pytest.mark.gpu
def test_raw_stream_is_the_current_one():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert torch_compat.raw_stream("cuda")(stream.device_index) == stream.cuda_stream


def test_has_triton_says_whether_it_can_be_imported():
    assert torch_compat.has_triton() == (importlib.util.find_spec("triton") is not None)


def test_a_plain_dispatch_mode_sees_ops_compiled_ones_too_without_loading_dynamo():
    code = """
import sys, torch
from xtrain import torch_compat
class Mode(torch_compat.PlainDispatchMode):
    seen = []
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))
with Mode():
    torch.ones(2).exp()
assert Mode.seen[-1] == "aten.exp.default" and "torch._dynamo" not in sys.modules
compiled = torch.compile(torch.sin, backend="eager")
compiled(torch.ones(3))
with Mode():
    compiled(torch.ones(3))
assert Mode.seen[-1] == "aten.sin.default"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_sequence_numbers_join_a_backward_to_its_forward():
    made, ran = {}, []

    class Mode(torch_compat.PlainDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            number = torch_compat.running_sequence_number()
            if number is None:
                made[torch_compat.last_sequence_number()] = str(func)
            else:
                ran.append((made.get(number), str(func)))
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, 3, requires_grad=True)
    with Mode():
        torch.autograd.grad(F.silu(x @ x).sum(), x)
    assert ("aten.silu.default", "aten.silu_backward.default") in ran
    assert ("aten.mm.default", "aten.mm.default") in ran
    assert torch_compat.running_sequence_number() is None


def test_a_backward_knows_whether_it_keeps_its_graph():
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(torch_compat.backward_keeps_graph()))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert seen == [True, False]


def test_a_dispatch_mode_is_noticed():
    from torch._subclasses import FakeTensorMode

    assert not torch_compat.is_observed()
    with FakeTensorMode():
        assert torch_compat.is_observed()


# --- modes that record, ops of libraries ----------------------------------------------------------


class Seen(torch_compat.RecordingMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def test_under_a_recording_mode_dynamo_compiles_and_leftover_code_is_seen():
    """And its tensors are those that the code holds: views, parts and writes keep their ids."""
    graphs = []

    def backend(module, _):
        def run(*args):
            with torch_compat.real_tensors():
                return module(*args)

        graphs.append(module)
        return run

    @torch.compiler.disable
    def left_over(x):
        return x.exp()

    compiled = torch.compile(lambda x: left_over(x.sin()).cos(), backend=backend)
    x = torch.ones(3)
    with Seen() as seen:
        compiled(x)
    assert len(graphs) == 2 and seen.ops == ["aten.exp.default"]

    made = {}

    class Ids(torch_compat.RecordingMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for part in result if isinstance(result, tuple | list) else (result,):
                made[id(part)] = part
            return result

    x = torch.ones(4, 4, requires_grad=True)
    with Ids():
        y = x * 2
        values = [y, y.view(-1), y[:, 1:], y.mT, y.detach(), *y.chunk(2), y.add_(1)]
    assert all(made.get(id(value)) is value for value in values)


def test_a_recording_mode_sees_higher_order_ops():
    from torch._higher_order_ops import out_dtype

    x = torch.ones(2, 2, dtype=torch.int8)
    with Seen() as seen:
        out_dtype(torch.ops.aten.mm.default, torch.int32, x, x)
    assert "out_dtype" in seen.ops[0]


LIBRARY = torch.library.Library("compat_test", "FRAGMENT")
for _name, _key in (("cpu", "CPU"), ("any", "CompositeExplicitAutograd"), ("taken_apart", "")):
    LIBRARY.define(f"{_name}(Tensor x) -> Tensor")
    LIBRARY.impl(_name, lambda x: x.exp() + 1, _key or "CompositeImplicitAutograd")


@torch.library.custom_op("compat_test::custom", mutates_args=())
def custom(x: torch.Tensor) -> torch.Tensor:
    return x.exp() + 1


custom.register_fake(torch.empty_like)
custom.register_autograd(lambda ctx, grad: grad)


def test_python_kernels_are_told_from_others():
    ops = torch.ops.compat_test
    for op in (ops.cpu, ops.any, ops.taken_apart, ops.custom):
        assert torch_compat.hidden_kernel(op.default, "cpu") == "", op
    assert "CUDA kernel is no Python" in torch_compat.hidden_kernel(ops.cpu.default, "cuda")
    for op in (torch.ops.aten.mm.default, torch.ops.mkldnn._linear_pointwise.default):
        assert "CPU kernel is no Python code" in torch_compat.hidden_kernel(op, "cpu"), op


@pytest.mark.parametrize("name", ["cpu", "any", "custom"])
def test_a_kernel_runs_on_tensors_without_memory_and_its_ops_are_seen(name):
    op = getattr(torch.ops.compat_test, name).default
    x = torch.ones(2, 3)
    with torch_compat.without_memory([x, x.mT]) as (copy, turned), Seen() as seen:
        assert turned.stride() == (1, 3)
        result = torch_compat.run_kernel(op, (copy,), {}, "cpu")
    assert result.shape == (2, 3) and result is not copy
    assert seen.ops == ["aten.exp.default", "aten.add.Tensor"]


@pytest.mark.parametrize(
    "read", [torch.Tensor.numpy, torch.Tensor.data_ptr, torch.Tensor.tolist, torch.Tensor.item]
)
def test_what_asks_for_memory_that_is_not_there_raises(read):
    with torch_compat.without_memory([torch.ones(1)]) as (copy,):
        with pytest.raises(Exception, match=r".+"):
            read(copy)
        assert torch.compile(lambda x: x + 1, backend="eager")(copy).shape == (1,)
    assert torch.ones(1).item() == 1


def test_sizes_that_are_symbols_are_answered_and_not_guarded():
    found = []

    def backend(module, example_inputs):
        values = [n.meta.get("example_value") for n in module.graph.nodes]
        value = next(v for v in values if isinstance(v, torch.Tensor))
        with torch_compat.without_memory([value]) as (copy,):
            found.append((bool(copy.shape[0] > 3), copy.shape[0] == value.shape[0]))
        return module

    compiled = torch.compile(lambda x: x + 1, backend=backend, dynamic=True)
    compiled(torch.ones(5, 2))
    compiled(torch.ones(2, 2))
    assert len(found) == 1 and found[0][0] and found[0][1]


# --- transforms -----------------------------------------------------------------------------------


def test_a_derivative_is_registered_and_forward_mode_is_refused():
    LIBRARY.define("scaled(Tensor x, float by) -> Tensor")
    LIBRARY.impl("scaled", lambda x, by: x * by, "CPU")
    op = torch.ops.compat_test.scaled.default
    kernel = torch_compat.autograd_kernel(
        op,
        lambda ctx, grad: (grad * ctx.by, None),
        lambda ctx, inputs, output: setattr(ctx, "by", inputs[1]),
    )
    LIBRARY.impl("scaled", kernel, "Autograd", with_keyset=True)
    x = torch.ones(3, requires_grad=True)
    op(x, 3.0).sum().backward()
    assert x.grad.tolist() == [3.0] * 3
    with pytest.raises(NotImplementedError, match="compat_test::scaled has no forward-mode"):
        torch.func.jvp(lambda x: op(x, 3.0), (x.detach(),), (x.detach(),))
    assert op(x, 3.0).tolist() == [3.0] * 3


def test_transforms_are_told_by_the_code_and_by_the_tensor():
    seen = []

    def told(x, y):
        seen.append(torch_compat.is_transformed(x))
        seen.append(torch_compat.in_function_transform())
        seen.append(torch_compat.is_mapped_in_part(x))
        seen.append(torch_compat.is_mapped_in_part(y))
        return x.sum() + y.sum()

    x, y = torch.ones(2, 3), torch.ones(3)
    torch.func.vmap(told, in_dims=(0, None))(x, y)
    assert seen == [True, True, False, True]
    seen.clear()
    torch.func.vmap(lambda x: torch.func.vmap(told, in_dims=(None, 0))(x, y))(x)
    assert seen == [True, True, True, True], "each has rows of one of the two maps"
    seen.clear()
    torch.func.grad(told)(x, y)
    assert seen == [True, True, False, False]
    seen.clear()
    told(x, y)
    assert seen == [False] * 4


def test_launches_of_triton_kernels_are_noted():
    """By whoever writes kernel[grid](...): the interface is the only place they all pass."""
    from triton.runtime.jit import JITFunction, KernelInterface

    assert issubclass(JITFunction, KernelInterface)
    ran, noted = [], []

    class Kernel(KernelInterface):
        def __init__(self, function):
            self.fn = function

        def run(self, *args, grid, warmup):
            ran.append(self.fn(*args))

    def double(x):
        return 2 * x

    with torch_compat.noting_launches(lambda name, args: noted.append((name, args))):
        Kernel(double)[1,](3)
    Kernel(double)[1,](4)
    assert ran == [6, 8] and noted == [("double", [3])]


def test_the_function_that_returned_a_tensor_has_a_name():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

    x = torch.ones(2, requires_grad=True)
    assert torch_compat.python_function(Twice.apply(x)) == "Twice"
    assert torch_compat.python_function(2 * x) == torch_compat.python_function(x) == ""
