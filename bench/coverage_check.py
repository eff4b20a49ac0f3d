"""What is checked on one class of models, inside the child process that coverage.py gives it.

    plain        torch.compile(fullgraph=True, backend="aot_eager") trains the shrunk model
    sites        xtrain.compile(dropout=0.5), same backend: residual sites, as the report lists them
    masks        what the dropout op did at each site, against ops.dropout_mask and rng.site_seed
    p0           dropout=0: loss and gradients bitwise those of `plain`
    checkpoint   the `sites` run under gradient checkpointing: gradients bitwise equal
    quick        what `sites` and `masks` say, from one eager forward: for a first look at many
    swaps        kernels="auto": what each pass replaced, and how far the loss moves
    verified     the same step by verify=True: loss, outputs and gradients against no swaps

A check is True, False, or text: why it could not be made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo
import torch._functorch.aot_autograd
import transformers
from torch import Tensor, nn

import xtrain
from bench.coverage_models import build, inputs, loss_of
from xtrain import torch_compat
from xtrain.compiler import SiteError
from xtrain.ops.dropout.op import dropout_on_cpu
from xtrain.rng import site_seed

P, SEED = 0.5, 1
_KINDS = {"attention": "A", "cross_attention": "C", "feed_forward": "F"}
Record = dict[str, Any]


def check_class(model_type: str, checks: tuple[str, ...], send: Callable[[Record], None]) -> None:
    """Run the checks of one class, sending what is known after each."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    record: Record = {}
    try:
        model = build(model_type)
        subject = _Subject(model)
        record["class"] = type(model).__name__
        record["num_parameters"] = sum(p.numel() for p in model.parameters())
        loss = loss_of(model(**subject.call))
        if checks != ("quick",):
            loss.backward()
    except Exception as error:
        send({**record, "not_built": first_line(error)})
        return
    for name in checks:
        send({**record, "running": name})
        getattr(subject, f"check_{name}")(record)
        send(record)


class _Subject:
    """One model, its inputs and the state that every run of it starts from."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.call = inputs(model)
        self.state = {k: v.clone() for k, v in model.state_dict().items()}
        self.plain: list[Tensor | None] = []
        self.dropped: list[Tensor | None] = []

    def train(self, compiled: Any) -> list[Tensor | None]:
        """Return the loss and the gradients of one training forward and backward."""
        self.model.load_state_dict(self.state)
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        loss = loss_of(compiled(**self.call))
        loss.backward()
        return [loss.detach(), *(p.grad for p in self.model.parameters())]

    def compiled(self, **keywords: Any) -> Any:
        torch._dynamo.reset()
        usual = dict(kernels="off", fullgraph=True, dropout=P, backend="aot_eager")
        return xtrain.compile(self.model, seed=SEED, **{**usual, **keywords})

    def check_plain(self, record: Record) -> None:
        torch._dynamo.reset()
        # A loss that logs through warning_once is no reason to count a class out.
        torch_compat.ignore_logging_calls()
        try:
            self.plain = self.train(torch.compile(self.model, backend="aot_eager", fullgraph=True))
            record["plain"] = True
        except Exception as error:
            record["plain"] = first_line(error)

    def check_sites(self, record: Record) -> None:
        """Sites and masks; where plain torch breaks the graph, ours is tried with breaks."""
        whole = record.get("plain") is True
        try:
            compiled = self.compiled(fullgraph=whole)
            with recorded_dropout() as calls:
                self.dropped = self.train(compiled)
        except Exception as error:
            kind = "refused" if isinstance(error, SiteError) else "failed"
            record[kind] = first_line(error)
            self._sites_without_strict(record, whole)
            return
        self._note_sites(record, compiled, calls)

    def check_quick(self, record: Record) -> None:
        """Sites and masks of one forward under backend="eager", with graph breaks if need be."""
        try:
            compiled = self.compiled(fullgraph=False, backend="eager")
            with recorded_dropout() as calls, torch.no_grad():
                compiled(**self.call)
        except Exception as error:
            record["refused" if isinstance(error, SiteError) else "failed"] = first_line(error)
            self._sites_without_strict(record, False)
            return
        self._note_sites(record, compiled, calls)

    def _note_sites(self, record: Record, compiled: Any, calls: list[Any]) -> None:
        report = compiled.report()
        record["graphs"] = report.num_train_graphs
        record["sites"] = spelt_sites(report.sites)
        record["by_model"] = sum(site.dropout == "model" for site in report.sites)
        record["masks"] = masks_agree(report.sites, calls)
        record["unseeded"] = len(report.unseeded)

    def _sites_without_strict(self, record: Record, whole: bool) -> None:
        with contextlib.suppress(Exception), torch.no_grad():
            compiled = self.compiled(fullgraph=whole, strict=False, backend="eager")
            compiled(**self.call)
            record["sites_not_strict"] = spelt_sites(compiled.report().sites)

    def check_p0(self, record: Record) -> None:
        if record.get("plain") is not True:
            record["p0"] = "plain torch.compile does not train it"
            return
        try:
            record["p0"] = all_equal(self.plain, self.train(self.compiled(dropout=0.0)))
        except Exception as error:
            record["p0"] = first_line(error)

    def check_checkpoint(self, record: Record) -> None:
        if "sites" not in record:
            return
        if not getattr(self.model, "supports_gradient_checkpointing", False):
            record["checkpoint"] = "the class has no gradient checkpointing"
            return
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        try:
            compiled = self.compiled(fullgraph=record.get("plain") is True)
            equal = all_equal(self.dropped, self.train(compiled))
            record["checkpoint"] = equal or self._plain_under_checkpointing() or False
        except Exception as error:
            record["checkpoint"] = self._plain_under_checkpointing() or first_line(error)
        finally:
            self.model.gradient_checkpointing_disable()

    def _plain_under_checkpointing(self) -> str:
        """What becomes of the model under plain torch.compile, checkpointed; "" if nothing does."""
        torch._dynamo.reset()
        try:
            trained = self.train(torch.compile(self.model, backend="aot_eager", fullgraph=True))
        except Exception as error:
            return f"plain torch.compile fails too: {first_line(error)}"
        if all_equal(self.plain, trained):
            return ""
        size = largest_difference(self.plain, trained)
        return f"plain torch.compile differs too, by up to {size:.1e}"

    def check_swaps(self, record: Record) -> None:
        if "sites" not in record:
            return
        try:
            whole = record.get("plain") is True
            compiled = self.compiled(kernels="auto", fullgraph=whole, verify=True)
            loss, *_ = self.train(compiled)
        except Exception as error:
            record["swaps"] = first_line(error)
            return
        swaps: dict[str, int] = {}
        for result in compiled.report().passes:
            if result.name.startswith(("use_", "fuse_")) and result.num_replaced:
                swaps[result.name] = swaps.get(result.name, 0) + result.num_replaced
        record["swaps"] = swaps
        record["swapped_loss_difference"] = abs(float(loss - self.dropped[0]))
        record["verified"] = dataclasses.asdict(compiled.report().verification)


def warm_up() -> None:
    """Import what every child needs before they are forked from one process.

    No backward: autograd's threads do not survive a fork.
    """
    import transformers.models.llama.modeling_llama  # noqa: F401

    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))])

        def forward(self, x: Tensor) -> Tensor:
            return x + self.layers[0][0](x)

    torch.set_num_threads(1)
    with torch.no_grad():
        xtrain.compile(Tiny(), dropout=P, seed=SEED, backend="aot_eager")(torch.ones(2, 2))
    torch._dynamo.reset()


def spelt_sites(sites: list[Any]) -> str:
    """Return sites as one word a block, a letter for each: "AF AF" for two usual layers.

    Letters are sorted: in which order parallel branches are added is no matter here.
    """
    words: dict[int, str] = {}
    for site in sites:
        kind = re.sub(r"_\d+$", "", site.site)
        words[site.layer] = words.get(site.layer, "") + _KINDS.get(kind, "?")
    return " ".join("".join(sorted(words[layer])) for layer in sorted(words))


@contextlib.contextmanager
def recorded_dropout() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Collect (x, out) of every call of the dropout op that runs on the CPU inside the context."""
    calls: list[tuple[Tensor, Tensor]] = []

    def record(x: Tensor, p: float, seed: Tensor, offset: Tensor) -> Tensor:
        out = dropout_on_cpu(x, p, seed, offset)
        calls.append((x.clone(), out.clone()))
        return out

    library = torch.library.Library("xtrain", "IMPL")
    library.impl("dropout", record, "CPU", allow_override=True)
    try:
        yield calls
    finally:
        library._destroy()


def masks_agree(sites: list[Any], calls: list[tuple[Tensor, Tensor]]) -> bool | str:
    """Whether each site that is ours dropped exactly what the oracle's mask for it says."""
    left = [site for site in sites if site.dropout == "xtrain"]
    for x, out in calls:
        for site in left:
            seed = site_seed(SEED, 0, site.layer, site.site)
            mask = xtrain.ops.dropout_mask(x.shape, P, seed)
            if torch.equal(torch.where(mask, x * 2.0, 0.0), out):
                left.remove(site)
                break
        else:
            return f"a call on {tuple(x.shape)} dropped by no site's mask"
    if left:
        return f"never dropped: {', '.join(site.name for site in left)}"
    return True


def all_equal(first: list[Tensor | None], second: list[Tensor | None]) -> bool:
    """Whether two lists of tensors are bitwise equal, missing gradients and NaNs included."""
    for a, b in zip(first, second, strict=True):
        if a is None or b is None:
            if a is not b:
                return False
        elif not torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0)):
            return False
    return True


def largest_difference(first: list[Tensor | None], second: list[Tensor | None]) -> float:
    """Return the largest difference of two lists of tensors where both have one."""
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    return max(float((a - b).abs().max()) for a, b in pairs if a.numel())


def first_line(error: BaseException) -> str:
    """Return the first lines that say something of an error, in one line of at most 300 signs."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:3]) if lines else ""
    return f"{type(error).__name__}: {text}"[:300]
