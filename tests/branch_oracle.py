"""Marks for the residual branches of plain models, and the eager run that puts dropout on them.

A model calls `drop(branch, self)` on every value that dropout belongs on, `self` being the block
whose branch it is. In a plain or compiled run that is the identity, which leaves no trace; inside
`Oracle` NumPy's masks are drawn there. The finder of sites has no part in it.
"""

from __future__ import annotations

import torch
from mask_oracle import keep_mask
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import xtrain
from xtrain.compiler import SiteError
from xtrain.rng import site_seed

P, SEED = 0.5, 1
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
    """Dropout on the marks of a model; `sites` are those that it has drawn, in running order."""

    def __init__(self, model: nn.Module, blocks: list[nn.Module] | None = None):
        blocks = list(model.blocks) if blocks is None else blocks
        self.layers = {block: layer for layer, block in enumerate(blocks)}
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


def refusal_or_dropout(make, inputs, compile_it, blocks=None, **keywords) -> SiteError | None:
    """Hold a training step against the oracle; return the SiteError that refused it, if one did.

    Args:     make: makes the model, the same at each call.
              blocks: of a model, its blocks in order; `model.blocks` unless it is given.
    """
    truth, model = make(), make()
    with Oracle(truth, blocks and blocks(truth)) as oracle:
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
    named = dict(truth.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, named[name].grad, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    return None
