"""Replayed calls: what the implementation does, to the bit, or the implementation itself."""

from __future__ import annotations

import ast
import ctypes
import inspect
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from samples import SAMPLES, maker, with_gradients
from test_contract import RecordCalls
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from xtrain import torch_compat
from xtrain.ops import OPS, core
from xtrain.ops import launch as replay
from xtrain.ops.cross_entropy.op import rows_by_kernel
from xtrain.ops.launch import launch, noting
from xtrain.ops.linear_cross_entropy import chunks
from xtrain.ops.linear_cross_entropy import op as linear_cross_entropy


class StubKernel:
    """A kernel of the CPU with what a replay takes of Triton's: out = x * FACTOR + y, of fp32."""

    def __init__(self):
        self.signature = inspect.signature(lambda x, y, out, n, FACTOR=2: None)
        self.arg_names = list(self.signature.parameters)
        self.streams: list[int | None] = []

    def __getitem__(self, grid):
        def start(x, y, out, n, FACTOR=2, stream=None):
            address = [t if isinstance(t, int) else t.data_ptr() for t in (x, y, out)]
            a, b, c = (
                np.ctypeslib.as_array((ctypes.c_float * n).from_address(at)) for at in address
            )
            np.copyto(c, a * np.float32(FACTOR) + b)
            self.streams.append(stream)
            return Compiled()

        class Compiled:
            def __getitem__(self, whole_grid):
                assert whole_grid == (*grid, 1, 1)[:3]
                return start

        return lambda *args, num_warps, **constants: start(*args, **constants)


KERNEL = StubKernel()
calls: list[str] = []  # of the implementation, each by the factor it was asked for


def implementation(y: Tensor, xs: list[Tensor], factor: float) -> tuple[Tensor, Tensor]:
    """By three launches, with memory of its own, a view of it, and a transposed result."""
    calls.append(f"{factor}")
    if factor < 0:
        return xs[0] * factor + y, (y[:, ::2] + 1).t().contiguous().t()
    rows, cols = y.shape
    first, scratch = torch.empty(y.shape), torch.empty(y.numel())
    second = torch.empty((cols // 2, rows)).transpose(0, 1)
    launch(KERNEL, (4,), xs[0], y, first, y.numel(), FACTOR=factor, num_warps=4)
    launch(KERNEL, (4, 2), first, xs[-1], scratch, y.numel(), num_warps=4)
    half = scratch.chunk(2)[1]
    launch(KERNEL, (1, 1, 1), half, xs[-1].contiguous(), second, y.numel() // 2, num_warps=4)
    return first, second


def fake(y: Tensor, xs: list[Tensor], factor: float) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), y.new_empty((y.shape[1] // 2, y.shape[0])).transpose(0, 1)


@pytest.fixture(scope="module")
def op() -> torch._ops.OpOverload:
    """An op with both forms whose kernel runs on the CPU and says when it does."""
    return core.define_op(
        "test_replayed(Tensor y, Tensor[] xs, float factor, bool opaque=False) -> (Tensor, Tensor)",
        fake=fake,
        decomposition=lambda y, xs, factor: (xs[0] - y, (y[:, ::2] - 1).t().contiguous().t()),
        cpu=implementation,
    )


@pytest.fixture
def call(op) -> replay.Replayed:
    calls.clear()
    return replay.Replayed(op, lambda y, xs, factor, opaque=False: implementation(y, xs, factor))


def inputs(shape=(4, 6), offset=0, dtype=torch.float32) -> tuple[Tensor, list[Tensor]]:
    """Fresh y and xs; their first elements lie `offset` elements behind an aligned address."""
    size = shape[0] * shape[1]
    new = [torch.randn(size + offset).to(dtype)[offset:].view(shape) for _ in range(3)]
    return new[0], new[1:]


def check(call: replay.Replayed, *args) -> None:
    """Same bits, shapes and strides as the implementation, in fresh memory; inputs as they were."""
    before = pytree.tree_map_only(Tensor, torch.clone, args)
    wanted = implementation(*args)
    calls.pop()
    found = call(*args)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()
    taken = {t.data_ptr() for t in pytree.tree_leaves(args) if isinstance(t, Tensor)}
    assert len({t.data_ptr() for t in found} - taken) == len(found)
    for a, b in zip(pytree.tree_leaves(args), pytree.tree_leaves(before), strict=True):
        assert a is b or torch.equal(a, b) if isinstance(a, Tensor) else a == b


def test_from_the_second_call_on_the_launches_alone_are_repeated(call):
    for _ in range(4):
        check(call, *inputs(), 3.0)
    assert calls == ["3.0"]
    results = [call(*inputs(), 3.0) for _ in range(2)]
    assert results[0][0].data_ptr() != results[1][0].data_ptr()


def test_what_decides_how_kernels_are_launched_is_recorded_anew(call):
    """Constants, shapes, strides, alignment, and each again is known."""
    y, xs = inputs()
    for _ in range(2):
        check(call, y, xs, 3.0)
        check(call, y, xs, 2.0)
        check(call, y, xs[:1], 3.0)
        check(call, *inputs((8, 2)), 3.0)
        check(call, *inputs(offset=1), 3.0)
        check(call, *inputs(offset=2), 3.0)
    assert len(calls) == 6


def test_a_tensor_given_twice_is_two_arguments(call):
    y, xs = inputs()
    check(call, y, [y, y], 3.0)
    check(call, y, xs, 3.0)
    assert len(calls) == 1


@pytest.mark.parametrize("why", ["operators alone", "copy of an input"])
def test_operators_are_called_again_in_their_order(call, why):
    for _ in range(3):
        y, xs = inputs()
        if why == "copy of an input":
            xs[1] = torch.randn(6, 4).t()  # the launch before takes its memory as it lies
            assert torch.equal(call(y, xs, 3.0)[1], implementation(y, xs, 3.0)[1])
            calls.pop()
        else:
            check(call, y, xs, -1.0)
    assert len(calls) == 1


def test_values_are_let_go_behind_their_last_reader(op):
    """A replay holds no more memory than the implementation: here one intermediate at a time."""
    import weakref

    made = []

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            made.append(weakref.ref(result))
            alive.append(sum(ref() is not None for ref in made))
            return result

    def chain(y, xs, factor):
        y[:1]  # read by nothing: not called again
        for _ in range(5):
            y = y * factor
        return y, y.add(xs[0])

    replayed = replay.Replayed(op, chain)
    for _ in range(2):
        alive: list[int] = []
        y, xs = inputs()
        made.clear()
        with Note():
            found = replayed(y, xs, 2.0)
        assert torch.equal(found[0], y * 32) and torch.equal(found[1], y * 32 + xs[0])
    assert alive == [1, 2, 2, 2, 2, 2]


def test_tensors_given_by_name_are_those_of_the_call(op):
    """Products into memory taken before, a part of it at a time, as linear_cross_entropy's are."""

    def products(y, xs, factor):
        first, second = y.new_empty((y.shape[0],) * 2), torch.empty_like(y)
        torch.mm(y, xs[0].t(), out=first)
        for part in (slice(0, 1), slice(1, 4)):
            torch.mm(first[part], xs[1], out=second[part])
        torch.addmm(first, xs[0], y.t(), alpha=factor, out=first)
        return first, second

    replayed = replay.Replayed(op, products)
    for _ in range(3):
        y, xs = inputs()
        before = [t.clone() for t in (y, *xs)]
        for found, wanted in zip(replayed(y, xs, 2.0), products(y, xs, 2.0), strict=True):
            assert torch.equal(found, wanted)
        assert all(torch.equal(a, b) for a, b in zip((y, *xs), before, strict=True))
    assert None not in replayed._plans.values()


def reads_a_value(y, xs, factor):
    return y * (1.0 if float(y[0, 0]) > 0 else -1.0), y + 0


def writes_to_an_input(y, xs, factor):
    return y.add_(1.0).clone(), xs[0] + 1


def writes_to_an_input_by_name(y, xs, factor):
    return torch.add(y, 1.0, out=y).clone(), xs[0] + 1


def keeps_memory(y, xs, factor):
    out = torch.empty(y.shape)
    launch(KERNEL, (1,), KEPT, y, out, y.numel(), num_warps=4)
    return out, out + 1


def passes_an_object(y, xs, factor):
    out = torch.empty(y.shape)
    launch(KERNEL, (1,), y, y, out, Number(y.numel()), num_warps=4)
    return out, out + 1


class Number(int):
    """Stands for a descriptor, which holds an address of this call's."""


KEPT = torch.ones(24)


@pytest.mark.parametrize(
    "function",
    [
        reads_a_value,
        writes_to_an_input,
        writes_to_an_input_by_name,
        keeps_memory,
        passes_an_object,
    ],
)
def test_what_depends_on_more_than_the_key_is_no_replay(op, function):
    replayed = replay.Replayed(op, function)
    replayed(*inputs(), 1.0)
    assert list(replayed._plans.values()) == [None]


def test_a_switch_that_the_implementation_goes_by_is_part_of_the_key(op):
    switch = [1.0]
    replayed = replay.Replayed(op, lambda y, xs, factor: (y * switch[0], y + 0), lambda: switch[0])
    y, xs = inputs()
    for value in (1.0, 2.0, 1.0, 2.0):
        switch[0] = value
        assert torch.equal(replayed(y, xs, 1.0)[0], y * value)
    assert len(replayed._plans) == 2


def test_plans_are_bounded(call, monkeypatch):
    monkeypatch.setattr(replay, "MAX_PLANS", 2)
    for rows in range(1, 8):
        check(call, *inputs((rows, 2)), 3.0)
        assert len(call._plans) <= 2


def test_inductors_code_makes_the_call(op, call, monkeypatch):
    """The code calls the replay, not the op; no graph holds the implementation's parts."""
    from torch._inductor.utils import fresh_cache, run_and_get_code

    monkeypatch.setitem(replay.CALLS, "test_replayed", call)
    torch_compat.call_in_inductors_code(
        op,
        replay.__name__,
        "CALLS['test_replayed']",
        lambda text: f"SITES['test_replayed', {text!r}]",
    )
    monkeypatch.setattr(torch_compat.lowering, "any_on_cuda", lambda values: True)

    def function(y, a, b):
        first, second = op(y.sin(), [a * 2, b], 3.0, opaque=True)
        return first + 1, second

    y, xs = inputs()
    with fresh_cache():
        compiled = torch.compile(function, fullgraph=True)
        _, code = run_and_get_code(compiled, y, *xs)
        site = "xtrain.ops.launch.SITES['test_replayed', 'torch.float32[4, 6][6, 1]cpu "
        assert site in code[0]
        assert "torch.ops.xtrain.test_replayed.default(" not in code[0]
        del calls[:]
        found = compiled(y, *xs)
        assert calls == []
        for a, b in zip(found, function(y, *xs), strict=True):
            torch.testing.assert_close(a, b)
        torch._dynamo.reset()
        dynamic = torch.compile(function, fullgraph=True, dynamic=True)
        _, code = run_and_get_code(dynamic, y, *xs)
        assert "xtrain.ops.launch.CALLS['test_replayed'](" in code[0]
        for shape in ((4, 6), (8, 2), (3, 10)):
            y, xs = inputs(shape)
            for a, b in zip(dynamic(y, *xs), function(y, *xs), strict=True):
                torch.testing.assert_close(a, b)


def test_calls_of_one_place_are_told_by_their_addresses(op, call, monkeypatch):
    """One plan while alignment and switches stay; others are Replayed's business."""
    switch = [0]
    call.state = lambda: switch[0]
    monkeypatch.setitem(replay.CALLS, "test_replayed", call)
    site = replay._Sites()["test_replayed", "as it stands"]

    def check_unseen(*args) -> None:
        with monkeypatch.context() as patch:  # the key is not built
            patch.setattr(call, "call", None)
            check(site, *args, 3.0)

    for offset in (0, 1, 2, 0, 1):  # in elements: 0, 4 and 8 bytes
        check(site, *inputs(offset=offset), 3.0)
        check(site, *inputs(offset=offset), 3.0)
        check_unseen(*inputs(offset=offset))
    y, xs = inputs(offset=1)
    check_unseen(y, [y, y])
    assert len(calls) == 3
    switch[0] = 1
    for _ in range(2):
        check(site, *inputs(offset=1), 3.0)
    check_unseen(*inputs(offset=1))
    assert len(calls) == 4


def test_every_kernel_is_launched_by_launch():
    """A kernel[grid](...) beside it would run while recording, and never again."""
    num_launches = 0
    for path in Path(replay.__file__).parent.rglob("*.py"):
        if "\nimport triton\n" not in (source := path.read_text()):
            continue
        called = [n.func for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call)]
        assert not [ast.unparse(func) for func in called if isinstance(func, ast.Subscript)]
        num_launches += [ast.unparse(func) for func in called].count("launch")
    assert num_launches >= 10


def recorded_calls(name: str, layout: str, dtype: torch.dtype, device: str):
    """(op, arguments) of the samples of an op, forward and backward."""
    op = OPS[name]
    for args in SAMPLES[name](maker(layout, dtype, device)):
        args = pytree.tree_map_only(Tensor, lambda t: t.to(device), args)
        yield op.forward, args
        with torch.enable_grad():
            outputs = op.forward(*with_gradients(name, args))
        outputs = [t for t in pytree.tree_leaves(outputs) if t.requires_grad]
        with RecordCalls(op.backward) as record:
            torch.autograd.backward(outputs, [torch.randn_like(t) for t in outputs])
        yield from ((op.backward, call) for call in record.calls)


@pytest.mark.parametrize("name", [name for name in OPS if name in replay.CALLS])
def test_a_replay_launches_with_the_arguments_of_the_first_call(name, monkeypatch):
    """On the CPU, with nothing behind Triton's front: grids, constants and addresses."""
    jit = pytest.importorskip("triton.runtime.jit").JITFunction
    launches: list[tuple] = []

    def note(grid, args) -> None:
        addresses = [a.data_ptr() if isinstance(a, Tensor) else a for a in args]
        launches.append(((*grid, 1, 1)[:3], addresses))

    class Compiled:
        def __getitem__(self, grid):
            return lambda *args, stream: note(grid, args)

    def run(self, *args, grid, warmup, **options):
        constants = {key: value for key, value in options.items() if key in self.arg_names}
        note(grid, self.signature.bind(*args, **constants).arguments.values())
        return Compiled()

    monkeypatch.setattr(jit, "run", run)
    # what an op does on the CPU alone
    monkeypatch.setattr(linear_cross_entropy, "check_range", lambda *_: None)
    monkeypatch.setattr(chunks, "row_function", lambda _: partial(rows_by_kernel, padded=True))
    replayed = []
    for op, args in recorded_calls(name, "contiguous", torch.bfloat16, "cpu"):
        call = replay.Replayed(op, replay.CALLS[op.name().partition("::")[2]]._implementation)
        launches.clear()
        call(*args)
        first = launches.copy()
        launches.clear()
        call(*args)
        if list(call._plans.values()) == [None]:
            continue
        replayed.append(op)
        fresh: dict[int, int] = {}  # where the first call's memory lay -> where this one's does
        for (grid, before), (same_grid, after) in zip(first, launches, strict=True):
            assert grid == same_grid and len(before) == len(after)
            for a, b in zip(before, after, strict=True):
                assert a == b or isinstance(a, int) and fresh.setdefault(a, b) == b
        taken = {t.data_ptr() for t in pytree.tree_leaves(args) if isinstance(t, Tensor)}
        assert not taken & fresh.keys() and not taken & set(fresh.values())
    assert {OPS[name].forward, OPS[name].backward} <= set(replayed)


def replays(op: torch._ops.OpOverload, args: tuple) -> int:
    """Check two calls against the op, to the bit; return 1 if the second was a replay, else 0."""
    call = replay.CALLS[op.name().partition("::")[2]]
    call._plans.clear()
    for _ in range(2):
        found, wanted = (pytree.tree_leaves(f(*args)) for f in (call, op))
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
            assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
    return sum(plan is not None for plan in call._plans.values())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "padded"])
@pytest.mark.parametrize("name", [name for name in OPS if name in replay.CALLS])
def test_replays_equal_the_op_on_a_gpu(name, layout, dtype):
    with torch.no_grad():
        calls = list(recorded_calls(name, layout, dtype, "cuda"))
        num_replays = sum(replays(op, args) for op, args in calls)
    if name == "sdpa":  # our kernel takes descriptors where it can
        assert num_replays > 0
    elif layout == "contiguous":
        assert num_replays >= sum(args[0].numel() > 0 for _, args in calls)


@pytest.mark.gpu
def test_kernels_start_by_inductors_launcher_on_a_gpu():
    """The way around it, for versions of torch that have no such launcher, costs the host more."""
    launches = []
    x = torch.randn(8, 64, device="cuda")
    with noting(launches.append):
        OPS["rms_norm"].public(x, torch.ones(64, device="cuda"))
    assert launches
    for _, compiled, grid, args, _ in launches:
        _, kept, _ = torch_compat.kernel_starter(compiled, (*grid, 1, 1)[:3])
        assert kept is not None and 0 < len(kept) and kept[0] == 0 and len(args) >= 3
