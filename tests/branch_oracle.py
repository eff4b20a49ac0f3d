"""Marks for the residual branches of plain models, and the eager run that puts dropout on them.

A model calls `drop(branch, self)` on every value that dropout belongs on, `self` being the block
whose branch it is. In a plain or compiled run that is the identity, which leaves no trace; inside
`Oracle` NumPy's masks are drawn there. The finder of sites has no part in it.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from mask_oracle import keep_mask
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import xtrain
from xtrain.compiler import SiteError
from xtrain.rng import site_seed

P, SEED, D = 0.5, 1, 16
_running: Oracle | None = None


def drop(value: Tensor, block: nn.Module, kind: str = "feed_forward") -> Tensor:
    """A residual branch of a block: the value itself, dropped inside `Oracle`."""
    return value if _running is None else _running.dropped(value, block, kind)


def marking() -> bool:
    """Whether an oracle runs: a sum whose branch is no value is then to be written apart."""
    return _running is not None


def recomputed(function, *args):
    """A checkpoint in a compiled run; the oracle's need not recompute."""
    return function(*args) if marking() else checkpoint(function, *args, use_reentrant=False)


class Oracle:
    """Dropout on the marks of a model; `sites` are those that it has drawn, in running order.

    layers: of the modules that mark branches, their ordinals.
    """

    def __init__(self, layers: dict[nn.Module, int]):
        self.layers = layers
        self.sites: list[tuple[int, str]] = []

    def dropped(self, value: Tensor, block: nn.Module, kind: str) -> Tensor:
        layer = self.layers[block]
        number = sum(at == layer and site.startswith(kind) for at, site in self.sites)
        site = kind if number == 0 else f"{kind}_{number + 1}"
        self.sites.append((layer, site))
        keep = keep_mask(tuple(value.shape), P, site_seed(SEED, 0, layer, site))
        return torch.where(torch.from_numpy(keep), value * (1 / (1 - P)), 0.0)

    def __enter__(self) -> Oracle:
        global _running
        _running = self
        return self

    def __exit__(self, *_) -> None:
        global _running
        _running = None


def total(outputs) -> Tensor:
    """A loss that every float element of the outputs decides."""
    outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
    weights = torch.linspace(0.5, 1.5, outputs[0].numel()).view(outputs[0].shape)
    return (outputs[0] * weights).square().sum() + sum(o.square().sum() for o in outputs[1:])


def layers_of_blocks(model) -> dict[nn.Module, int]:
    """`model.blocks` in order, and behind them the model itself."""
    return {module: layer for layer, module in enumerate([*model.blocks, model])}


def refusal_or_dropout(
    make, inputs, compile_it, layers=layers_of_blocks, **keywords
) -> SiteError | None:
    """Hold a training step against the oracle; return the SiteError that refused it, if one did.

    Args:     make: makes the model, the same at each call.
              layers: of a model, the ordinals of the modules that mark branches.
    """
    truth, model = make(), make()
    with Oracle(layers(truth)) as oracle:
        wanted = truth(*inputs)
        total(wanted).backward()
    compiled = compile_it(model, dropout=P, seed=SEED, backend="eager", **keywords)
    try:
        found = compiled(*inputs)
    except SiteError as error:
        return error
    ran = [(s.layer, s.site) for s in compiled.last_executed_sites]
    assert sorted(ran) == sorted(oracle.sites), f"dropout on {ran}, and right is {oracle.sites}"
    assert [s.name for s in compiled.report().sites if s.dropout != "xtrain"] == []
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    total(found).backward()
    gradients = {name: parameter.grad for name, parameter in truth.named_parameters()}
    for name, parameter in model.named_parameters():
        said = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-5, msg=said)
    return None


def hook_masks(sites: dict[nn.Module, tuple[int, str]], p: float = P) -> None:
    """Have modules drop what they return, the first of several: for branches that are modules.

    sites: module -> its (layer, site).
    """
    for module, site in sites.items():
        seed = site_seed(SEED, 0, *site)

        def drop(_, __, out, seed=seed):
            first, *others = out if isinstance(out, tuple) else (out,)
            keep = torch.from_numpy(keep_mask(tuple(first.shape), p, seed))
            first = torch.where(keep, first * (1 / (1 - p)), 0.0)
            return (first, *others) if isinstance(out, tuple) else first

        module.register_forward_hook(drop)


def hook_masks_of_llama(model: nn.Module) -> None:
    """Dropout on the branches of a model of transformers that is made like Llama."""
    for i, block in enumerate(model.model.layers):
        hook_masks({block.self_attn: (i, "attention"), block.mlp: (i, "feed_forward")})


both = pytest.mark.parametrize("compile_it", [xtrain.compile, xtrain.compile_blocks])


def x(length=6):
    return torch.randn(2, length, D, generator=torch.Generator().manual_seed(3))


def made(cls, *args):
    def make():
        torch.manual_seed(0)
        return cls(*args)

    return make


def hold(cls, compile_it, *args, inputs=None, layers=layers_of_blocks, must_run=True):
    """Dropout as the oracle has it, or, where it need not run, a SiteError, which is returned."""
    error = refusal_or_dropout(made(cls, *args), inputs or (x(),), compile_it, layers)
    assert error is None or not must_run, f"refused: {error}"
    return error


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def heads(self, x):
        return x.unflatten(-1, (2, D // 2)).transpose(1, 2)

    def attention(self, x, keys=None):
        q, k, v = map(self.heads, self.qkv(x).chunk(3, -1))
        k, v = (k, v) if keys is None else keys
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def mlp(self, x):
        return self.down(F.gelu(self.up(x)))

    def forward(self, x):
        x = x + drop(self.attention(self.norm(x)), self, "attention")
        return x + drop(self.mlp(self.norm2(x)), self)


class Stack(nn.Module):
    """The blocks one after another."""

    def __init__(self, block=Block, depth=2):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def in_training(model, compile_it=xtrain.compile, **keywords):
    """Compile a model, as it is, to train; torch's generator begins anew."""
    torch.manual_seed(0)
    return compile_it(
        model.train(),
        **{"dropout": P, "seed": 0, "backend": "eager", "dynamic": False, **keywords},
    )
