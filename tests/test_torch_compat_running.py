"""The contract of torch_compat/running.py: what is asked of torch while a model runs."""

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
