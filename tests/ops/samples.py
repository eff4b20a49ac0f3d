"""Inputs of every op, in several memory layouts: what the tests over all of OPS iterate over.

SAMPLES[name](make) yields argument tuples for `OPS[name].forward`; `make(*shape)` returns a float
tensor in the layout and dtype under test. The tests check that no op lacks its entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

Make = Callable[..., Tensor]
LAYOUTS = ("contiguous", "transposed", "expanded", "sliced", "padded")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def maker(layout: str, dtype: torch.dtype, device: str = "cpu") -> Make:
    """Return make(*shape) -> a fresh random tensor of that shape in this layout."""

    def make(*shape: int) -> Tensor:
        def randn(*sizes: int) -> Tensor:
            return torch.randn(*sizes).to(device, dtype)

        last = shape[-1]
        if layout == "transposed" and len(shape) == 4:  # [B, N, T, H] as models build it
            return randn(shape[0], shape[2], shape[1], last).transpose(1, 2)
        if layout == "transposed" and len(shape) >= 2:
            return randn(*shape[:-2], last, shape[-2]).transpose(-1, -2)
        if layout == "expanded":
            return randn(1, *shape[1:]).expand(shape)
        if layout == "sliced":
            return randn(*shape[:-1], 2 * last)[..., ::2]
        if layout == "padded":
            return randn(*shape[:-1], last + 64)[..., :last]
        return randn(*shape)

    return make


def _int64(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int64)


def _dropout(make: Make) -> Iterator[tuple[Any, ...]]:
    for shape in ((3, 5, 8), (1, 7), (0, 8), (4, 0)):
        yield make(*shape), 0.25, _int64(5), _int64(3)
    for p in (0.0, 1.0):
        yield make(2, 3), p, _int64(5), _int64(0)


def _dropout_add_rms_norm(make: Make) -> Iterator[tuple[Any, ...]]:
    random = 0.25, _int64(5), _int64(3)
    for shape, cast in (((2, 3, 8), "llama"), ((3, 8), "gemma"), ((1, 7), "llama")):
        yield make(*shape), make(*shape), make(shape[-1]), *random, 1e-5, cast
    yield make(2, 8), make(2, 8).float(), make(8).float(), *random, 1e-5, "llama", torch.bfloat16
    for p in (0.0, 1.0):
        yield make(2, 3), make(2, 3), make(3), p, _int64(5), _int64(0), 1e-5, "llama"
    for shape in ((0, 8), (2, 0)):
        yield make(*shape), make(*shape), make(shape[-1]), *random, 1e-5, "llama"


def _sdpa(make: Make) -> Iterator[tuple[Any, ...]]:
    def qkv(B: int, N: int, M: int, T: int, S: int, H: int) -> tuple[Tensor, ...]:
        return make(B, N, T, H), make(B, M, S, H), make(B, M, S, H)

    sees = torch.rand(2, 1, 5, 7) > 0.4
    sees[0, 0, 3] = False  # a row that sees nothing
    additive = torch.randn(4, 5, 7).masked_fill(~sees[0], float("-inf"))
    yield *qkv(2, 4, 2, 5, 5, 8), None, True, 0.3, None, None
    yield *qkv(2, 4, 2, 5, 7, 8), sees, True, 0.3, 3, None
    yield *qkv(1, 4, 4, 5, 7, 6), additive, False, 0.3, None, 2.0
    yield *qkv(2, 2, 1, 0, 3, 8), None, True, 0.3, None, None
    yield *qkv(2, 2, 1, 1, 1, 8), None, False, 0.3, None, None
    yield *qkv(0, 2, 1, 3, 0, 8), None, False, 0.3, None, None
    documents = torch.tensor([[7, 7, 3, 3, 3], [0, 1, 1, 1, 2]])
    yield *qkv(2, 4, 2, 5, 5, 8), None, True, 0.3, 4, None, documents


def _rms_norm(make: Make) -> Iterator[tuple[Any, ...]]:
    yield make(2, 5, 3, 8), make(8), 1e-5, "llama"
    for shape, cast in (((2, 3, 8), "llama"), ((3, 8), "gemma"), ((1, 7), "llama")):
        yield make(*shape), make(shape[-1]), 1e-5, cast
    yield make(2, 8).float(), make(8), 1e-5, "llama", torch.bfloat16
    yield make(0, 8), make(8), 1e-5, "gemma"
    yield make(2, 0), make(0), 1e-5, "llama"


def _tables(*shape: int) -> tuple[Tensor, Tensor]:
    angles = torch.randn(shape)
    return angles.cos(), angles.sin()


def _rope(make: Make) -> Iterator[tuple[Any, ...]]:
    yield make(2, 3, 5, 8), *_tables(5, 4), "half"
    yield make(2, 3, 5, 8), *_tables(2, 5, 3), "interleaved"
    yield make(1, 1, 1, 7), *_tables(1, 3), "half"
    yield make(0, 3, 5, 8), *_tables(5, 4), "interleaved"
    yield make(2, 3, 0, 8), *_tables(0, 4), "half"


def _rope_qk(make: Make) -> Iterator[tuple[Any, ...]]:
    yield make(2, 4, 5, 8), make(2, 2, 5, 8), *_tables(5, 4), "half"
    yield make(2, 4, 5, 8), make(2, 1, 5, 8), *_tables(2, 5, 3), "interleaved"
    yield make(2, 4, 0, 8), make(2, 2, 0, 8), *_tables(0, 4), "half"


def _swiglu(make: Make) -> Iterator[tuple[Any, ...]]:
    for shape in ((2, 3, 8), (1, 7), (0, 8), (4, 0)):
        yield make(*shape), make(*shape)


def _swiglu_packed(make: Make) -> Iterator[tuple[Any, ...]]:
    for shape, order in (((2, 3, 8), "gate_up"), ((1, 14), "up_gate"), ((0, 8), "up_gate")):
        yield make(*shape), order
    yield make(4, 0), "gate_up"


def _geglu(make: Make) -> Iterator[tuple[Any, ...]]:
    for i, args in enumerate(_swiglu(make)):
        yield *args, ("none", "tanh")[i % 2]


def _geglu_packed(make: Make) -> Iterator[tuple[Any, ...]]:
    for i, args in enumerate(_swiglu_packed(make)):
        yield *args, ("tanh", "none")[i % 2]


def _cross_entropy(make: Make) -> Iterator[tuple[Any, ...]]:
    targets = torch.tensor([[0, 8, -100, 3], [5, 5, 2, -100]])
    weights = torch.rand(2, 4)
    yield make(2, 4, 9), targets, weights, -100, 0.1, 1e-3, "mean"
    yield make(2, 4, 9), targets, None, -100, 0.0, 0.0, "none"
    yield make(1, 9), targets[:1, 0], None, -100, 0.0, 0.0, "sum"
    yield make(2, 9), torch.full((2,), -100), None, -100, 0.0, 0.0, "mean"
    yield make(0, 9), targets[0, :0], None, -100, 0.1, 0.0, "mean"


def _linear_cross_entropy(make: Make) -> Iterator[tuple[Any, ...]]:
    targets = torch.tensor([[0, 8, -100, 3], [5, 5, 2, -100]])
    weights = torch.rand(2, 4)
    none, plain = torch.full((2,), -100), (-100, 0.0, 0.0, None)
    options = (-100, 0.1, 1e-3, 5.0)
    yield make(2, 4, 6), make(9, 6), targets, weights, *options, "mean", True, True, "fp32"
    yield make(2, 4, 6), make(9, 6), targets, None, *plain, "sum", True, True, "same"
    yield make(2, 4, 6), make(9, 6), targets, weights, *options, "none", False, False, "fp32"
    yield make(2, 4, 6), make(9, 6), targets, None, *plain, "mean", False, True, "fp32"
    yield make(1, 6), make(9, 6), targets[:1, 0], None, *options, "sum", False, False, "fp32"
    yield make(2, 6), make(9, 6), none, None, *plain, "mean", True, True, "fp32"
    yield make(0, 6), make(9, 6), targets[0, :0], None, *plain, "mean", True, True, "fp32"
    yield make(2, 0), make(9, 0), targets[0, :2], None, *plain, "sum", True, True, "fp32"


SAMPLES: dict[str, Callable[[Make], Iterator[tuple[Any, ...]]]] = {
    "dropout": _dropout,
    "dropout_add_rms_norm": _dropout_add_rms_norm,
    "rms_norm": _rms_norm,
    "rope": _rope,
    "rope_qk": _rope_qk,
    "sdpa": _sdpa,
    "swiglu": _swiglu,
    "swiglu_packed": _swiglu_packed,
    "geglu": _geglu,
    "geglu_packed": _geglu_packed,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
}

# --- sizes around those that kernels cut at, for runs under compute-sanitizer --------------------


def _rows(make: Make) -> list[Tensor]:
    """The last at three distances, [B, N, T, H], its last row at the end of its memory."""
    heads = make(3, 7, 198)[..., 99:].unflatten(-1, (3, 33)).transpose(1, 2)
    return [make(1, 1), make(1, 1025), make(133, 129), make(3, 4099), heads]


def _two(make: Make) -> list[tuple[Tensor, Tensor]]:
    return list(zip(_rows(make), _rows(make), strict=True))


def _halves(make: Make) -> list[tuple[Tensor, str]]:
    return [(make(1, 2), "gate_up"), (make(1, 2050), "up_gate"), (make(3, 258), "gate_up")]


def _awkward_sdpa(make: Make) -> Iterator[tuple[Any, ...]]:
    for T, S, H in ((1, 1, 8), (65, 129, 40), (129, 129, 72)):
        q, k, v = make(2, 4, T, H), make(2, 2, S, H), make(2, 2, S, H)
        yield q, k, v, None, True, H**-0.5, None, 20.0
        yield q, k, v, None, True, H**-0.5, 17, None
    yield q, k, v, None, True, H**-0.5, None, None, (torch.arange(T) // 40).expand(2, T)


_RANDOM = 0.25, _int64(-7046029254386353131), _int64(2**31 - 3)
_MEAN = (-100, 0.1, 1e-3, None, "mean", True, True)
_GELUS = ("none", "tanh")
AWKWARD: dict[str, Callable[[Make], Iterable[tuple[Any, ...]]]] = {
    "dropout": lambda make: [(x, *_RANDOM) for x in _rows(make)],
    "rms_norm": lambda make: [
        (x, make(x.shape[-1]), 1e-5, cast) for x in _rows(make) for cast in ("llama", "gemma")
    ],
    "dropout_add_rms_norm": lambda make: [
        (x, residual, make(x.shape[-1]), *_RANDOM, 1e-5, "llama")
        for x, residual in [*_two(make), (make(5, 129), make(5, 129).float())]
    ],
    "swiglu": _two,
    "swiglu_packed": _halves,
    "geglu": lambda make: [(*args, gelu) for args in _two(make) for gelu in _GELUS],
    "geglu_packed": lambda make: [(*args, gelu) for args in _halves(make) for gelu in _GELUS],
    "rope_qk": lambda make: [
        args
        for layout in ("half", "interleaved")
        for args in (
            (make(1, 1, 1, 2), make(1, 1, 1, 2), *_tables(1, 1), layout),
            (make(2, 5, 33, 10), make(2, 1, 33, 10), *_tables(2, 33, 3), layout),
        )
    ],
    "sdpa": _awkward_sdpa,
    "cross_entropy": lambda make: [
        (make(T, V), torch.randint(V, (T,)), None, -100, 0.1, 1e-3, "mean")
        for T, V in ((1, 1), (5, 1025), (3, 4099))
    ],
    "linear_cross_entropy": lambda make: [
        (make(T, D), make(V, D), torch.randint(V, (T,)), None, *_MEAN, accumulation)
        for T, D, V in ((1, 1, 1), (5, 33, 1025), (131, 8, 129))
        for accumulation in ("fp32", "same")
    ],
}

# Positions of float arguments that are constants by contract: no gradient is promised.
CONSTANTS: dict[str, tuple[int, ...]] = {
    "cross_entropy": (2,),
    "linear_cross_entropy": (3,),
    "rope": (1, 2),
    "rope_qk": (2, 3),
}

# What backward is to find again, past single numbers: positions of arguments, then of results.
SAVED: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "dropout": ((), ()),
    "dropout_add_rms_norm": ((2,), (0,)),
    "rms_norm": ((0, 1), ()),
    "rope": ((1, 2), ()),
    "rope_qk": ((2, 3), ()),
    "sdpa": ((0, 1, 2, 3), (0, 1)),
    "swiglu": ((0, 1), ()),
    "swiglu_packed": ((0,), ()),
    "geglu": ((0, 1), ()),
    "geglu_packed": ((0,), ()),
    "cross_entropy": ((0, 1, 2), (1,)),
    "linear_cross_entropy": ((2, 3), (1, 3, 4)),  # of a mean: the gradients, not the inputs
}


def with_gradients(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments as leaves in their layout that want gradients, where the op gives them."""

    def leaf(position: int, value: Any) -> Any:
        constant = position in CONSTANTS.get(name, ())
        if isinstance(value, Tensor) and value.is_floating_point() and not constant:
            return value.detach().requires_grad_()
        return value

    return tuple(leaf(position, value) for position, value in enumerate(args))


def wanting_gradients(args: tuple[Any, ...]) -> list[Tensor]:
    """The arguments that `with_gradients` made leaves."""
    return [t for t in args if isinstance(t, Tensor) and t.requires_grad]
