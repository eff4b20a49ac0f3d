"""Swaps of random small graphs: values and gradients as eager gives them, in fp64 and in bf16.

A program is one or two formulas that the swaps know, in one of their spellings, cut into steps.
Each step runs in the contexts whose spans cover it (grad modes, autocast, inference mode), and what
it gives may go through an action: a detach, a cast, a view, a write in place, a hook, another
reader. The whole may be a checkpoint's body. Values and gradients of the swapped graph are held to
eager's by class E2; a program that eager itself refuses, or Dynamo, is no example.

Thousands of them:  python tests/passes/test_fuzz_swaps.py 5000 [seed]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for a run by hand

import pytest
import torch
import torch.nn.functional as F
from harness import capture
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st
from swapping import run
from tolerances import TOLERANCES, max_error
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from xtrain import ops
from xtrain.compiler.swaps import _SWAPS
from xtrain.passes import fx_utils
from xtrain.passes.normalise import normalise
from xtrain.passes.remove_noop_views import remove_noop_views

B, T, N, M, H, V = 2, 4, 4, 2, 4, 7
D = N * H

# --- a program ------------------------------------------------------------------------------------

SPANS = ("no_grad", "enable_grad", "grad_off", "autocast", "autocast_off", "inference")
ACTIONS = (
    *("detach", "data", "same_cast", "widened", "same_view", "whole_slice", "turned", "times_one"),
    *("write", "write_view", "add_in_place", "write_operand", "hook", "leak", "out_of_place"),
)


@dataclass(frozen=True)
class Program:
    """What to run: formulas by name; (first step, steps, context); (step, action).

    Steps are counted through all formulas, and around again.
    """

    formulas: tuple[str, ...]
    spans: tuple[tuple[int, int, str], ...] = ()
    actions: tuple[tuple[int, str], ...] = ()
    in_checkpoint: bool = False
    frozen: frozenset[str] = frozenset()
    chained: bool = False  # the second formula reads what the first gives

    def __call__(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        if self.in_checkpoint:
            return checkpoint(self._run, *leaves, use_reentrant=False)
        return self._run(*leaves)

    def _run(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        given = Given(*(x * 1 if x.dtype.is_floating_point else x for x in leaves))
        steps = Steps(self, given.x)
        results = []
        for name in self.formulas:
            result = FORMULAS[name](steps, given)
            results.append(result)
            if self.chained and result.shape == given.x.shape:
                given = Given(result, *given[1:])
        return (*results, *steps.leaked)


class Given(tuple):
    """The leaves of every program, by name: copies of them, since a program may write."""

    x: Tensor

    def __new__(cls, *values: Tensor):
        return super().__new__(cls, values)

    x, y, w, z, r, head = (property(lambda self, i=i: self[i]) for i in range(6))
    targets = property(lambda self: self[6])


def leaves_of(dtype: torch.dtype, frozen: frozenset[str]) -> tuple[Tensor, ...]:
    """x, y, z, r: activations [B, T, D]; w: a weight; head: a matrix; targets."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16).to(dtype)

    x, y, z, r = (normal(B, T, D) for _ in range(4))
    w, head = 1 + normal(D) / 4, normal(V, D) / 2
    targets = torch.randint(0, V, (B, T), generator=generator)
    named = {"x": x, "y": y, "w": w, "z": z, "r": r, "head": head}
    for name, leaf in named.items():
        leaf.requires_grad_(name not in frozen)
    return (*named.values(), targets)


class Steps:
    """Runs the steps of a program one by one, each in its contexts and with its actions."""

    def __init__(self, program: Program, operand: Tensor):
        total = sum(NUM_STEPS[name] for name in program.formulas)
        self.spans = [(first % total, count, name) for first, count, name in program.spans]
        self.actions = [(step % total, action) for step, action in program.actions]
        self.operand, self.step = operand, 0
        self.leaked: list[Tensor] = []

    def __call__(self, thunk: Callable[[], Tensor]) -> Tensor:
        step, self.step = self.step, self.step + 1
        spans = [c for first, count, c in self.spans if first <= step < first + count]
        value = within(spans, thunk)
        for place, action in self.actions:
            if place == step:
                value = within(spans, partial(self._act, action, value))
        return value

    def _act(self, action: str, v: Tensor) -> Tensor:
        if action == "write_operand":
            self.operand.mul_(1.25)
        elif action == "leak":
            self.leaked.append(v * 0.5)
        else:
            return act(action, v)
        return v


def within(spans: list[str], thunk: Callable[[], Tensor]) -> Tensor:
    if not spans:
        return thunk()
    with context_of(spans[0]):
        return within(spans[1:], thunk)


def context_of(name: str) -> Any:
    if name == "no_grad":
        return torch.no_grad()
    if name == "enable_grad":
        return torch.enable_grad()
    if name == "grad_off":
        return torch.set_grad_enabled(False)
    if name == "inference":
        return torch.inference_mode()
    return torch.autocast("cpu", torch.bfloat16, enabled=name == "autocast")


def act(action: str, v: Tensor) -> Tensor:
    if action == "detach":
        return v.detach()
    if action == "data":
        return v.data
    if action == "same_cast":
        return v.to(v.dtype)
    if action == "widened":
        return wide(v).to(v.dtype)
    if action == "same_view":
        return v.view(v.shape)
    if action == "whole_slice":
        return v[...]
    if action == "turned":
        return v.transpose(0, -1).transpose(0, -1)
    if action == "times_one":
        return v * 1.0
    if action == "write":
        return v.mul_(1.5)
    if action == "write_view":
        v.ravel()[:2].mul_(0.5)
        return v
    if action == "add_in_place":
        v += 0.25
        return v
    if action == "out_of_place":
        return v + 0.25
    assert action == "hook"
    v.register_hook(lambda gradient: 2 * gradient)
    return v


def wide(x: Tensor) -> Tensor:
    return x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)


# --- the formulas, step by step -------------------------------------------------------------------


def llama(do: Steps, g: Given) -> Tensor:
    c = do(lambda: wide(g.x))
    variance = do(lambda: c.pow(2).mean(-1, keepdim=True))
    rstd = do(lambda: torch.rsqrt(variance + 1e-6))
    n = do(lambda: c * rstd)
    n = do(lambda: n.to(g.x.dtype))
    return do(lambda: g.w * n)


def gemma(do: Steps, g: Given) -> Tensor:
    c = do(lambda: wide(g.x))
    rstd = do(lambda: torch.rsqrt(c.pow(2).mean(-1, keepdim=True) + 1e-6))
    one_plus = do(lambda: 1.0 + wide(g.w))
    n = do(lambda: c * rstd)
    n = do(lambda: n * one_plus)
    return do(lambda: n.type_as(g.x))


def olmo(do: Steps, g: Given) -> Tensor:
    c = do(lambda: wide(g.x))
    rms = do(lambda: torch.sqrt(c.square().mean(-1, keepdim=True) + 1e-6))
    n = do(lambda: c / rms)
    n = do(lambda: g.w * n)
    return do(lambda: n.to(g.x.dtype))


def plain_rms(do: Steps, g: Given) -> Tensor:
    n = do(lambda: F.rms_norm(g.x, (D,), None, 1e-6))
    return do(lambda: g.w * n)


def added_norm(do: Steps, g: Given) -> Tensor:
    h = do(lambda: g.r + g.x)
    y = do(lambda: F.rms_norm(h, (D,), g.w, 1e-6))
    return do(lambda: h + y)


def dropped_norm(do: Steps, g: Given) -> Tensor:
    d = do(lambda: ops.dropout(g.x, 0.5, torch.full((), 7, dtype=torch.int64)))
    h = do(lambda: g.r + d)
    y = do(lambda: F.rms_norm(h, (D,), g.w, 1e-6))
    return do(lambda: h * y)


def tables(do: Steps, g: Given, layout: str) -> tuple[Tensor, Tensor]:
    frequencies = do(lambda: 10.0 ** -torch.arange(H // 2, dtype=torch.float32))
    angles = do(lambda: torch.arange(T, dtype=torch.float32)[:, None] * frequencies)
    if layout == "half":
        angles = do(lambda: torch.cat((angles, angles), -1))
    elif layout == "interleaved":
        angles = do(lambda: angles.repeat_interleave(2, -1))
    cos = do(lambda: angles.cos().to(g.x.dtype))
    return cos, do(lambda: angles.sin().to(g.x.dtype))


def rotate_half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., H // 2 :], x[..., : H // 2]), -1)


def rotate_pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def rope(do: Steps, g: Given, rotate: Any = rotate_half, layout: str = "half") -> Tensor:
    cos, sin = tables(do, g, layout)
    q, k = (do(lambda v=v: v.view(B, T, N, H).transpose(1, 2)) for v in (g.x, g.y))
    turned = []
    for v in (q, k):
        straight = do(lambda v=v: v * cos)
        across = do(lambda v=v: rotate(v))
        across = do(lambda across=across: across * sin)
        turned.append(do(lambda a=straight, b=across: a + b))
    return do(lambda: turned[0] * turned[1])


def rope_in_parts(do: Steps, g: Given) -> Tensor:
    cos, sin = tables(do, g, "parts")
    q = do(lambda: g.x.view(B, T, N, H).transpose(1, 2))
    a, b = q[..., : H // 2], q[..., H // 2 :]
    first = do(lambda: a * cos - b * sin)
    second = do(lambda: b * cos + a * sin)
    return do(lambda: torch.cat((first, second), -1))


def swiglu(do: Steps, g: Given) -> Tensor:
    a = do(lambda: F.silu(g.x))
    return do(lambda: a * g.y)


def swiglu_spelt_out(do: Steps, g: Given) -> Tensor:
    s = do(lambda: torch.sigmoid(g.x))
    a = do(lambda: g.x * s)
    return do(lambda: g.y * a)


def swiglu_packed(do: Steps, g: Given) -> Tensor:
    gate, up = do(lambda: g.x[..., : D // 2]), do(lambda: g.x[..., D // 2 :])
    a = do(lambda: F.silu(gate))
    return do(lambda: a * up)


def geglu(do: Steps, g: Given, approximate: str = "none") -> Tensor:
    a = do(lambda: F.gelu(g.x, approximate=approximate))
    return do(lambda: a * g.y)


def geglu_spelt_out(do: Steps, g: Given) -> Tensor:
    cube = do(lambda: g.x + 0.044715 * g.x**3)
    t = do(lambda: torch.tanh(math.sqrt(2 / math.pi) * cube))
    a = do(lambda: 0.5 * g.x * (1 + t))
    return do(lambda: a * g.y)


def heads(do: Steps, g: Given) -> tuple[Tensor, ...]:
    q = do(lambda: g.x.view(B, T, N, H).transpose(1, 2))
    k, v = (do(lambda t=t: t[..., : M * H].view(B, T, M, H).transpose(1, 2)) for t in (g.y, g.z))
    return q, k, v


def attention(do: Steps, g: Given) -> Tensor:
    q, k, v = heads(do, g)
    k, v = (do(lambda t=t: t.repeat_interleave(N // M, 1)) for t in (k, v))
    y = do(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    return do(lambda: y.transpose(1, 2).reshape(B, T, D))


def attention_with_mask(do: Steps, g: Given) -> Tensor:
    q, k, v = heads(do, g)
    shape = B, M, N // M, T, H
    k, v = (do(lambda t=t: t[:, :, None].expand(shape)) for t in (k, v))
    k, v = (do(lambda t=t: t.reshape(B, N, T, H)) for t in (k, v))
    position = do(lambda: torch.arange(T))
    mask = do(lambda: position[:, None] >= position)
    y = do(lambda: F.scaled_dot_product_attention(q, k, v, mask))
    return do(lambda: y.transpose(1, 2).reshape(B, T, D))


def head_and_loss(do: Steps, g: Given, cap: float = 0.0) -> Tensor:
    logits = do(lambda: F.linear(g.x, g.head))
    logits = do(lambda: wide(logits))
    if cap:
        logits = do(lambda: logits / cap)
        logits = do(lambda: torch.tanh(logits))
        logits = do(lambda: logits * cap)
    logits = do(lambda: logits.view(-1, V))
    return do(lambda: F.cross_entropy(logits, g.targets.view(-1)))


def shifted_loss(do: Steps, g: Given) -> Tensor:
    logits = do(lambda: F.linear(g.x, g.head))
    logits = do(lambda: logits[:, :-1])
    logits = do(lambda: wide(logits.flatten(0, 1)))
    return do(lambda: F.cross_entropy(logits, g.targets[:, 1:].flatten(), reduction="sum"))


FORMULAS: dict[str, Callable[[Steps, Given], Tensor]] = {
    "llama": llama,
    "gemma": gemma,
    "olmo": olmo,
    "plain_rms": plain_rms,
    "added_norm": added_norm,
    "dropped_norm": dropped_norm,
    "rope_half": rope,
    "rope_interleaved": partial(rope, rotate=rotate_pairs, layout="interleaved"),
    "rope_in_parts": rope_in_parts,
    "swiglu": swiglu,
    "swiglu_spelt_out": swiglu_spelt_out,
    "swiglu_packed": swiglu_packed,
    "geglu_erf": geglu,
    "geglu_tanh": partial(geglu, approximate="tanh"),
    "geglu_spelt_out": geglu_spelt_out,
    "attention": attention,
    "attention_with_mask": attention_with_mask,
    "loss": head_and_loss,
    "capped_loss": partial(head_and_loss, cap=4.0),
    "shifted_loss": shifted_loss,
}


def num_steps(formula: Callable[[Steps, Given], Tensor]) -> int:
    steps = Steps(Program(()), torch.zeros(()))
    formula(steps, Given(*leaves_of(torch.float32, frozenset())))
    return steps.step


NUM_STEPS = {name: num_steps(formula) for name, formula in FORMULAS.items()}
_STEP = st.integers(0, 59)
PROGRAMS = st.builds(
    Program,
    formulas=st.lists(st.sampled_from(sorted(FORMULAS)), min_size=1, max_size=2).map(tuple),
    spans=st.lists(st.tuples(_STEP, st.integers(1, 5), st.sampled_from(SPANS)), max_size=3).map(
        tuple
    ),
    actions=st.lists(st.tuples(_STEP, st.sampled_from(ACTIONS)), max_size=2).map(tuple),
    in_checkpoint=st.booleans(),
    frozen=st.frozensets(st.sampled_from(("x", "y", "w", "z", "r", "head")), max_size=3),
    chained=st.booleans(),
)

UNHURRIED = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))

# --- what must hold -------------------------------------------------------------------------------


class NoExample(Exception):
    """Eager or Dynamo does not run the program."""


def evaluated(function: Callable[..., Any], leaves: tuple[Tensor, ...]) -> list[Tensor | None]:
    """The results of a call and the gradients of their weighted sum, None where there is none."""
    inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in leaves]
    results = function(*inputs)
    total = torch.zeros((), dtype=torch.float64)
    for i, result in enumerate(results):
        ramp = torch.linspace(-1, 1, max(1, result.numel()), dtype=torch.float64)
        if result.requires_grad and not result.is_inference():
            total = total + (result.double() * torch.cos(5 * ramp + i).view(result.shape)).sum()
    if total.requires_grad:
        total.backward()
    return [*(r.detach() for r in results), *(x.grad for x in inputs)]


def graph_of(program: Program, leaves: tuple[Tensor, ...]) -> fx.GraphModule:
    """A copy of the graph that Dynamo makes of a program."""
    try:
        captured = capture(program, *leaves)
    except (torch._dynamo.exc.TorchDynamoException, AssertionError) as error:
        raise NoExample(str(error)) from error
    module = fx_utils.clone_graph(captured.module)
    module.meta["positions"] = [
        next(i for i, leaf in enumerate(leaves) if leaf is value) for value in captured.inputs
    ]
    return module


def swap_all(module: fx.GraphModule) -> int:
    """Run all passes from normalise on; return how many swaps they made."""
    normalise(module.graph)
    count = 0
    for swap in _SWAPS:
        count += swap(module.graph, kernels="triton", backend="aot_eager").num_replaced
    remove_noop_views(module.graph)
    for part in fx_utils.walk_graphs(module):
        part.graph.lint()
        part.recompile()
    return count


def check(program: Program, dtype: torch.dtype) -> int:
    """Hold the swapped graph of a program to eager; return how many swaps it has."""
    exact, leaves = (leaves_of(d, program.frozen) for d in (torch.float64, dtype))
    try:
        # What eager refuses for a write in place, a checkpoint computes, with wrong gradients.
        truth = evaluated(replace(program, in_checkpoint=False), exact)
        plain = evaluated(program, leaves)
    except (RuntimeError, IndexError) as error:
        raise NoExample(str(error)) from error
    module = graph_of(program, leaves)
    count = swap_all(module)
    is_rounded = dtype != torch.float64 and any("autocast" in c for *_, c in program.spans)
    atol = TOLERANCES[torch.bfloat16 if is_rounded else dtype][1]
    try:
        compare(evaluated(partial(run, module), leaves), plain, truth, atol)
    except Exception:
        try:
            compare(evaluated(partial(run, graph_of(program, leaves)), leaves), plain, truth, atol)
        except Exception as error:  # a hook, say: its higher-order op runs under AOTAutograd alone
            raise NoExample("Dynamo's own graph is no better") from error
        raise
    return count


def compare(
    found: list[Tensor | None], plain: list[Tensor | None], truth: list[Tensor | None], atol: float
) -> None:
    """Assert error(found) <= 2 * error(plain) + atol, and a gradient wherever eager has one."""
    assert len(found) == len(plain) == len(truth)
    for i, (actual, reference, value) in enumerate(zip(found, plain, truth, strict=True)):
        assert (actual is None) == (reference is None), f"value {i}: None, or not"
        if actual is None or reference is None or value is None:
            continue
        assert actual.dtype == reference.dtype and actual.shape == reference.shape
        scale = max(1.0, float(value.abs().max()))
        bound = 2 * max_error(reference, value) + atol * scale
        error = max_error(actual, value)
        assert error <= bound, f"value {i}: error {error:.3g}, bound {bound:.3g}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_formula_is_swapped_where_nothing_stands_in_the_way(dtype):
    for name in FORMULAS:
        assert check(Program((name,)), dtype) > 0, name


@settings(UNHURRIED, max_examples=100, derandomize=True)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@given(program=PROGRAMS)
def test_swaps_of_random_programs(program, dtype):
    try:
        check(program, dtype)
    except NoExample:
        assume(False)


def search(count: int, start: int = 0) -> None:
    """Check `count` random programs in both dtypes, printing what fails."""
    tally = {"checked": 0, "no example": 0, "failed": 0, "swaps": 0}

    @seed(start)
    @settings(UNHURRIED, max_examples=count, phases=[Phase.generate])
    @given(program=PROGRAMS, dtype=st.sampled_from((torch.float64, torch.bfloat16)))
    def each(program: Program, dtype: torch.dtype) -> None:
        try:
            tally["swaps"] += check(program, dtype)
            tally["checked"] += 1
        except NoExample:
            tally["no example"] += 1
        except Exception as error:
            tally["failed"] += 1
            print(f"{dtype} {program}\n    {type(error).__name__}: {error}", flush=True)

    each()
    print(", ".join(f"{name}: {n}" for name, n in tally.items()))


if __name__ == "__main__":
    search(*map(int, sys.argv[1:]))
