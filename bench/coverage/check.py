"""What is checked on one class of models, inside the child process that it is given.

    plain        torch.compile(fullgraph=True, backend="aot_eager") trains the shrunk model
    sites        xtrain.compile(dropout=0.5), same backend: residual sites, as the report lists them
    masks        what the dropout op did at each site, against ops.dropout_mask and rng.site_seed
    p0           dropout=0: loss and gradients bitwise those of `plain`
    checkpoint   the `sites` run under gradient checkpointing: gradients bitwise equal
    quick        what `sites` and `masks` say, from one eager forward: for a first look at many
    swaps        kernels="auto": what each pass replaced, and how far the loss moves
    verified     the same step by verify=True: loss, outputs and gradients against no swaps

A check is True, False, or text: why it could not be made.

A class is built from a configuration that is shrunk to two layers of hidden size 64, by the names
of its fields: configs.toml says what a field of that name becomes wherever it stands
(sub-configurations too), and what a type needs beyond. Dropout of the models' own is off, so that
two runs can be compared bit for bit. Lists with one entry a layer keep the first layer and the
first that differs from it: a hybrid shows both of its blocks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._functorch.aot_autograd
import transformers
from torch import Tensor, nn

import xtrain
from bench.coverage import model_types
from xtrain import torch_compat
from xtrain.compiler import SiteError
from xtrain.ops.dropout.op import dropout_on_cpu
from xtrain.rng import site_seed

P, SEED = 0.5, 1
NUM_LAYERS, HEADS, VOCAB = 2, 4, 128
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
        try:
            getattr(subject, f"check_{name}")(record)
        except Exception as error:
            record[name] = first_line(error)
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

    def train_plain(self) -> list[Tensor | None]:
        """Train by torch.compile alone."""
        torch._dynamo.reset()
        return self.train(torch.compile(self.model, backend="aot_eager", fullgraph=True))

    def check_plain(self, record: Record) -> None:
        # A loss that logs through warning_once is no reason to count a class out.
        torch_compat.ignore_logging_calls()
        self.plain = self.train_plain()
        record["plain"] = True

    def check_sites(self, record: Record) -> None:
        """Sites and masks; where plain torch breaks the graph, ours is tried with breaks."""
        self._find_sites(record, fullgraph=record.get("plain") is True)

    def check_quick(self, record: Record) -> None:
        """Sites and masks of one forward under backend="eager", with graph breaks if need be."""
        self._find_sites(record, fullgraph=False, backend="eager")

    def _find_sites(self, record: Record, **keywords: Any) -> None:
        try:
            compiled = self.compiled(**keywords)
            with recorded_dropout() as calls:
                if "backend" in keywords:
                    with torch.no_grad():
                        compiled(**self.call)
                else:
                    self.dropped = self.train(compiled)
        except Exception as error:
            record["refused" if isinstance(error, SiteError) else "failed"] = first_line(error)
            self._sites_without_strict(record, keywords["fullgraph"])
            return
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
        else:
            record["p0"] = all_equal(self.plain, self.train(self.compiled(dropout=0.0)))

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
        try:
            trained = self.train_plain()
        except Exception as error:
            return f"plain torch.compile fails too: {first_line(error)}"
        if all_equal(self.plain, trained):
            return ""
        size = largest_difference(self.plain, trained)
        return f"plain torch.compile differs too, by up to {size:.1e}"

    def check_swaps(self, record: Record) -> None:
        if "sites" not in record:
            return
        whole = record.get("plain") is True
        compiled = self.compiled(kernels="auto", fullgraph=whole, verify=True)
        loss, *_ = self.train(compiled)
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


# --- models ---------------------------------------------------------------------------------------

_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "decoder_layers")


def build(model_type: str) -> nn.Module:
    """Return the shrunk model of a type, in training mode, seeded. Raises what building raises."""
    model_class = getattr(transformers, model_types()[model_type])
    config = shrunk_config(model_type, model_class.config_class)
    if model_class._can_set_experts_implementation():
        config._experts_implementation = "batched_mm"  # traces whole on a CPU, unlike the default
    torch.manual_seed(0)
    return model_class(config).train()


def inputs(model: nn.Module) -> dict[str, Any]:
    """Return token ids and labels: two samples of nine tokens, no padding."""
    # Tokens from 3 on: 0 to 2 pad, begin and end.
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    call: dict[str, Any] = dict(input_ids=ids, labels=ids.clone())
    if "use_cache" in inspect.signature(model.forward).parameters:
        call["use_cache"] = False
    return call


def shrunk_config(model_type: str, config_class: type) -> Any:
    """Return the small configuration of a type."""
    extra = _configs().get(model_type, {})
    try:
        default = config_class().to_dict()
    except Exception:  # no defaults of its own: everything comes from configs.toml
        default = {}
    values = _shrunk(default, _sizes())
    if values.get("is_encoder_decoder"):
        values["is_encoder_decoder"] = False
    if "is_decoder" in default:
        values["is_decoder"] = True
    return config_class(**_merged(values, extra))


@cache
def _configs() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "configs.toml").read_text())


@cache
def _sizes() -> dict[str, int]:
    """Return what a field becomes, by its name."""
    sizes = _configs()["sizes"]
    return {name: int(value) for value, names in sizes.items() for name in names.split()}


def _shrunk(default: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    depth = next((default[n] for n in _LAYER_COUNTS if isinstance(default.get(n), int)), 0)
    lists = {k: v for k, v in default.items() if _is_per_layer(v, depth)}
    kept = _kept_layers(list(lists.values()))
    for name, value in default.items():
        if name in ("model_type", "transformers_version", "architectures", "dtype"):
            continue
        if isinstance(value, dict) and name.endswith("config"):
            values[name] = _shrunk(value, sizes)
            if "model_type" in value:
                values[name]["model_type"] = value["model_type"]
        elif name in lists:
            values[name] = [value[i] for i in kept]
        elif name in _TOKENS:
            values[name] = _TOKENS[name]
        elif _is_dropout(name, value):
            values[name] = type(value)(0)
        elif name == "num_key_value_heads" and isinstance(value, int):
            heads = default.get("num_attention_heads", value)
            values[name] = HEADS if value == heads else 1 if value == 1 else HEADS // 2
        elif name == "head_dim" and "qk_rope_head_dim" in default:
            values[name] = sizes["qk_rope_head_dim"]  # latent attention rotates that part alone
        elif name in sizes and isinstance(value, int):
            values[name] = sizes[name]
    return values


def _is_per_layer(value: Any, depth: int) -> bool:
    return isinstance(value, list | tuple) and depth > NUM_LAYERS and len(value) == depth


def _kept_layers(lists: list[list[Any]]) -> list[int]:
    """The first layer, and the one that differs from it in most of the lists."""
    if not lists:
        return []
    differing = [sum(values[i] != values[0] for values in lists) for i in range(len(lists[0]))]
    second = differing.index(max(differing)) or 1
    return [0, second]


def _is_dropout(name: str, value: Any) -> bool:
    drops = "drop" in name or name.endswith("pdrop") or "jitter" in name
    return drops and isinstance(value, float | int) and not isinstance(value, bool)


def _merged(values: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for name, value in extra.items():
        if isinstance(value, dict) and isinstance(merged.get(name), dict):
            merged[name] = _merged(merged[name], value)
        elif value == "__absent__":
            merged.pop(name, None)
        else:
            merged[name] = value
    return merged


def loss_of(output: Any) -> Tensor:
    """Return the loss of a model's output."""
    return output.loss if hasattr(output, "loss") else output[0]
