"""Swaps of random small programs: values and gradients as eager gives them, in fp64 and in bf16.

A program is one or two formulas that the swaps know, in one of their spellings, a line a step. Some
lines run in other contexts (grad modes, autocast, inference mode), and what some of them give goes
through an action: a detach, a cast, a view, a write in place, a hook, another reader. The whole may
be the body of a checkpoint. Values and gradients of the graph with all swaps are held to eager's by
class E2; a program that eager itself refuses, or Dynamo, is no example.

Thousands of them:  python tests/passes/test_fuzz_swaps.py 5000 [seed]
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import groupby
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
from xtrain.compiler.backend import _SWAPS
from xtrain.passes.graph import clone_graph, walk_graphs
from xtrain.passes.swaps.normalise import normalise, remove_noop_views

B, T, N, M, H, V = 2, 4, 4, 2, 4, 7
D = N * H

# --- formulas, a line a step: of x, y, z, r [B, T, D], w [D], head [V, D], targets [B, T] -------


def wide(x: Tensor) -> Tensor:
    return x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)


def rotate_half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., H // 2 :], x[..., : H // 2]), -1)


def rotate_pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


ANGLES = """
    frequencies = 10.0 ** -torch.arange(H // 2, dtype=torch.float32)
    angles = torch.arange(T, dtype=torch.float32)[:, None] * frequencies
"""
TABLES = """
    cos = angles.cos().to(x.dtype)
    sin = angles.sin().to(x.dtype)
    q = x.view(B, T, N, H).transpose(1, 2)
    k = y.view(B, T, N, H).transpose(1, 2)
"""
ROTATIONS = """
    straight = q * cos
    turned = rotate(q)
    turned = turned * sin
    q = straight + turned
    straight = k * cos
    turned = rotate(k)
    turned = turned * sin
    k = straight + turned
    out = q * k
"""
HEADS = """
    q = x.view(B, T, N, H).transpose(1, 2)
    k = y[..., : M * H].view(B, T, M, H).transpose(1, 2)
    v = z[..., : M * H].view(B, T, M, H).transpose(1, 2)
"""
FORMULAS = {
    "llama": """
        c = wide(x)
        variance = c.pow(2).mean(-1, keepdim=True)
        rstd = torch.rsqrt(variance + 1e-6)
        n = c * rstd
        n = n.to(x.dtype)
        out = w * n
    """,
    "gemma": """
        c = wide(x)
        rstd = torch.rsqrt(c.pow(2).mean(-1, keepdim=True) + 1e-6)
        one_plus = 1.0 + wide(w)
        n = c * rstd
        n = n * one_plus
        out = n.type_as(x)
    """,
    "olmo": """
        c = wide(x)
        square = c.square()
        rms = torch.sqrt(square.mean(-1, keepdim=True) + 1e-6)
        n = c / rms
        n = w * n
        out = n.to(x.dtype)
    """,
    "plain_rms": """
        n = F.rms_norm(x, (D,), None, 1e-6)
        out = w * n
    """,
    "added_norm": """
        h = r + x
        n = F.rms_norm(h, (D,), w, 1e-6)
        out = h + n
    """,
    "dropped_norm": """
        d = ops.dropout(x, 0.5, torch.full((), 7, dtype=torch.int64))
        h = r + d
        n = F.rms_norm(h, (D,), w, 1e-6)
        out = h * n
    """,
    "rope_half": f"""
        {ANGLES}
        angles = torch.cat((angles, angles), -1)
        {TABLES}
        {ROTATIONS.replace("rotate", "rotate_half")}
    """,
    "rope_interleaved": f"""
        {ANGLES}
        angles = angles.repeat_interleave(2, -1)
        {TABLES}
        {ROTATIONS.replace("rotate", "rotate_pairs")}
    """,
    "rope_in_parts": f"""
        {ANGLES}
        {TABLES}
        a = q[..., : H // 2]
        b = q[..., H // 2 :]
        first = a * cos - b * sin
        second = b * cos + a * sin
        out = torch.cat((first, second), -1)
    """,
    "attention": f"""
        {HEADS}
        k = k.repeat_interleave(N // M, 1)
        v = v.repeat_interleave(N // M, 1)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = a.transpose(1, 2).reshape(B, T, D)
    """,
    "attention_with_mask": f"""
        {HEADS}
        k = k[:, :, None].expand(B, M, N // M, T, H)
        v = v[:, :, None].expand(B, M, N // M, T, H)
        k = k.reshape(B, N, T, H)
        v = v.reshape(B, N, T, H)
        position = torch.arange(T)
        mask = position[:, None] >= position
        a = F.scaled_dot_product_attention(q, k, v, mask)
        out = a.transpose(1, 2).reshape(B, T, D)
    """,
    "loss": """
        logits = F.linear(x, head)
        logits = wide(logits)
        logits = logits.view(-1, V)
        out = F.cross_entropy(logits, targets.view(-1))
    """,
    "capped_loss": """
        logits = F.linear(x, head)
        logits = logits / 4.0
        logits = torch.tanh(logits)
        logits = logits * 4.0
        out = F.cross_entropy(logits.flatten(0, 1), targets.view(-1))
    """,
    "shifted_loss": """
        logits = F.linear(x, head)
        logits = logits[:, :-1]
        logits = wide(logits.flatten(0, 1))
        out = F.cross_entropy(logits, targets[:, 1:].flatten(), reduction="sum")
    """,
}
for _swap in _SWAPS:  # and those that the swaps' own tests bring
    _tests = import_module(f"test_{_swap.__module__.rpartition('.')[2]}")
    FORMULAS |= getattr(_tests, "FORMULAS", {})

# --- programs -------------------------------------------------------------------------------------

CONTEXTS = {
    "no_grad": "torch.no_grad()",
    "enable_grad": "torch.enable_grad()",
    "grad_off": "torch.set_grad_enabled(False)",
    "autocast": 'torch.autocast("cpu", torch.bfloat16)',
    "autocast_off": 'torch.autocast("cpu", enabled=False)',
    "inference": "torch.inference_mode()",
}
ACTIONS = {
    "detach": "v = v.detach()",
    "data": "v = v.data",
    "same_cast": "v = v.to(v.dtype)",
    "widened": "v = wide(v).to(v.dtype)",
    "same_view": "v = v.view(v.shape)",
    "whole_slice": "v = v[...]",
    "turned": "v = v.transpose(0, -1).transpose(0, -1)",
    "times_one": "v = v * 1.0",
    "plus": "v = v + 0.25",
    "write": "v.mul_(1.5)",
    "write_view": "v.ravel()[:2].mul_(0.5)",
    "add_in_place": "v += 0.25",
    "write_operand": "x.mul_(1.25)",
    "hook": "v.register_hook(double)",
    "leak": "leaks = (*leaks, v * 0.5)",
}
LEAVES = ("x", "y", "z", "r", "w", "head")


def double(gradient: Tensor) -> Tensor:
    return 2 * gradient


NAMES = {"torch": torch, "F": F, "math": math, "ops": ops, "wide": wide, "double": double}
NAMES |= {"rotate_half": rotate_half, "rotate_pairs": rotate_pairs}
NAMES |= {"B": B, "T": T, "N": N, "M": M, "H": H, "V": V, "D": D}


@dataclass(frozen=True)
class Program:
    """What to run: formulas by name; (first line, lines, context); (line, action).

    Lines are counted through all formulas, and around again.
    """

    formulas: tuple[str, ...]
    spans: tuple[tuple[int, int, str], ...] = ()
    actions: tuple[tuple[int, str], ...] = ()
    in_checkpoint: bool = False
    frozen: frozenset[str] = frozenset()
    chained: bool = False  # the second formula reads what the first gives

    def source(self) -> str:
        """The program as Python."""
        steps = [(i, s.strip()) for i, f in enumerate(self.formulas) for s in lines_of(f)]
        lines = [f"{name} = {name} * 1" for name in LEAVES] + ["leaks = ()"]
        contexts: list[tuple[str, ...]] = [()] * len(lines)
        for step, (formula, line) in enumerate(steps):
            around = tuple(
                CONTEXTS[name]
                for first, count, name in self.spans
                if first % len(steps) <= step < first % len(steps) + count
            )
            value = line.split(" = ")[0]
            given = [line]
            for place, action in self.actions:
                if place % len(steps) == step:
                    given.append(re.sub(r"\bv\b", value, ACTIONS[action]))
            if value == "out":
                given.append(f"out{formula} = out")
                if self.chained:
                    given.append("x = out if out.shape == x.shape else x")
            lines += given
            contexts += [around] * len(given)
        results = ", ".join(f"out{i}" for i in range(len(self.formulas)))
        body = [f"def program({', '.join(LEAVES)}, targets):"]
        for around, block in groupby(zip(contexts, lines, strict=True), key=lambda pair: pair[0]):
            indent = "    "
            for context in around:
                body.append(f"{indent}with {context}:")
                indent += "    "
            body += [indent + line for _, line in block]
        return "\n".join([*body, f"    return {results}, *leaks"])

    def function(self) -> Callable[..., tuple[Tensor, ...]]:
        namespace = dict(NAMES)
        exec(self.source(), namespace)
        program = namespace["program"]
        if not self.in_checkpoint:
            return program
        return lambda *leaves: checkpoint(program, *leaves, use_reentrant=False)


def lines_of(formula: str) -> list[str]:
    return [line for line in FORMULAS[formula].splitlines() if line.strip()]


def leaves_of(dtype: torch.dtype, frozen: frozenset[str]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16).to(dtype)

    values = [*(normal(B, T, D) for _ in range(4)), 1 + normal(D) / 4, normal(V, D) / 2]
    for name, leaf in zip(LEAVES, values, strict=True):
        leaf.requires_grad_(name not in frozen)
    return *values, torch.randint(0, V, (B, T), generator=generator)


_LINE = st.integers(0, 59)
_SPANS = st.tuples(_LINE, st.integers(1, 6), st.sampled_from(sorted(CONTEXTS)))
_ACTIONS = st.tuples(_LINE, st.sampled_from(sorted(ACTIONS)))
PROGRAMS = st.builds(
    Program,
    formulas=st.lists(st.sampled_from(sorted(FORMULAS)), min_size=1, max_size=2).map(tuple),
    spans=st.lists(_SPANS, min_size=1, max_size=3).map(tuple),
    actions=st.lists(_ACTIONS, max_size=2).map(tuple),
    in_checkpoint=st.booleans(),
    frozen=st.frozensets(st.sampled_from(LEAVES), max_size=3),
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
        captured = capture(program.function(), *leaves)
    except (torch._dynamo.exc.TorchDynamoException, AssertionError) as error:
        raise NoExample(str(error)) from error
    module = clone_graph(captured.module)
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
    for part in walk_graphs(module):
        part.graph.lint()
        part.recompile()
    return count


def check(program: Program, dtype: torch.dtype) -> int:
    """Hold the swapped graph of a program to eager; return how many swaps it has."""
    exact, leaves = (leaves_of(d, program.frozen) for d in (torch.float64, dtype))
    try:
        # What eager refuses for a write in place, a checkpoint computes, with wrong gradients.
        truth = evaluated(replace(program, in_checkpoint=False).function(), exact)
        plain = evaluated(program.function(), leaves)
    except (RuntimeError, IndexError) as error:
        raise NoExample(str(error)) from error
    graph = graph_of(program, leaves)
    module = clone_graph(graph)
    count = swap_all(module)
    is_rounded = dtype != torch.float64 and any("autocast" in c for *_, c in program.spans)
    atol = TOLERANCES[torch.bfloat16 if is_rounded else dtype][1]
    try:
        compare(evaluated(partial(run, module), leaves), plain, truth, atol)
    except Exception:
        try:
            compare(evaluated(partial(run, graph), leaves), plain, truth, atol)
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


def test_every_formula_is_swapped_where_nothing_stands_in_the_way():
    for i, name in enumerate(FORMULAS):
        assert check(Program((name,)), (torch.float64, torch.bfloat16)[i % 2]) > 0, name


@settings(UNHURRIED, max_examples=100, derandomize=True)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@given(program=PROGRAMS)
def test_swaps_of_random_programs(program, dtype):
    try:
        check(program, dtype)
    except NoExample:
        assume(False)


def search(count: int, start: int = 0) -> None:
    """Check `count` random programs, in one dtype or the other, printing what fails."""
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
