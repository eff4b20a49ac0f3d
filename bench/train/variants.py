"""What compare.py and compare_hf.py measure: the setting of a run, the ways to train one step.

A kind of model is a row of KINDS: xtrain's own model and a GPT-2 with dropout modules of its own
(compare.py), an unmodified Llama of transformers (compare_hf.py). Who runs what is here, what is
promised of it in report.py. No torch: the parent process and `--help` read this; worker processes
build it (subject.py).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Variant:
    """One way to run the training step.

    label:      its name in the table.
    compiler:   "" | "torch" | "xtrain" | "xtrain-blocks" (compile_blocks).
    dropout:    "" | "F.dropout" (called by the model on both branches) | "xtrain" (inserted).
    options:    further keywords of xtrain.compile.
    build:      of a Llama, "hf": transformers' LlamaForCausalLM, unchanged; "liger": the same,
                patched by Liger-Kernel; "own": xtrain.model.Transformer of the same shape.
    timed:      False for one that is run for its first step alone.
    """

    name: str
    label: str
    compiler: str = ""
    dropout: str = ""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    build: str = ""
    timed: bool = True

    @property
    def reference(self) -> str:
        """The variant whose losses it is held to, "" of a Llama's.

        With dropout from xtrain it has the same masks, with F.dropout other ones.
        """
        by_dropout = {"": "eager-p0", "F.dropout": "eager", "xtrain": "xtrain-eager"}
        return "" if self.build else by_dropout[self.dropout]


def _own(
    name: str, label: str, compiler: str = "xtrain", dropout: str = "xtrain", **options: Any
) -> Variant:
    return Variant(name, label, compiler, dropout, options)


def _llama(name: str, label: str, build: str = "hf", compiler: str = "", **fields: Any) -> Variant:
    options = {"logits": "drop"} if compiler == "xtrain" else {}
    return Variant(name, label, compiler, build=build, options=options, **fields)


_OWN = (
    _own("eager", "eager + F.dropout", "", "F.dropout"),
    _own("torch", "torch.compile + F.dropout", "torch", "F.dropout"),
    _own("torch-p0", "torch.compile, no dropout", "torch", ""),
    _own("xtrain", "xtrain.compile, dropout"),
    _own("xtrain-p0", "xtrain.compile, no dropout", "xtrain", ""),
    _own("xtrain-eager", "xtrain eager, dropout", backend="eager"),
    _own(
        "xtrain-fused-rounding",
        "xtrain.compile, dropout, fused rounding",
        options={"emulate_precision_casts": False},
    ),
    _own(
        "xtrain-torch-sdpa",
        "xtrain.compile, dropout, torch's attention",
        disable_passes=("use_triton_sdpa",),
    ),
    _own("xtrain-drop", "xtrain.compile, dropout, logits dropped", logits="drop"),
    _own("eager-p0", "eager, no dropout", "", ""),
)
_HF = "transformers + xtrain.compile"
_LLAMA = (
    _llama("eager", "transformers"),
    _llama("torch", "transformers + torch.compile", "hf", "torch"),
    _llama("liger", "transformers + Liger", "liger"),
    _llama("liger-torch", "transformers + Liger + torch.compile", "liger", "torch"),
    _llama("xtrain", f"{_HF}, dropout", "hf", "xtrain", dropout="xtrain"),
    _llama("xtrain-p0", f"{_HF}, no dropout", "hf", "xtrain"),
    _llama(
        "own", "xtrain's Transformer + xtrain.compile, dropout", "own", "xtrain", dropout="xtrain"
    ),
    _llama("blocks", f"{_HF}_blocks", "hf", "xtrain-blocks", dropout="xtrain", timed=False),
)


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    default:    variants of a run that names none; others are run for their losses, or price an
                option.
    num_losses: first steps of each variant; the first of them compiles.
    curves:     whether every step's loss is kept, or those of the first steps alone.
    """

    variants: dict[str, Variant]
    default: tuple[str, ...]
    num_blocks: int
    num_losses: int
    curves: bool = False

    def listing(self) -> str:
        """Return what `--help` says of the variants."""
        return "variants:\n" + "\n".join(f"  {v.name:22}{v.label}" for v in self.variants.values())


_COMPARED = Kind(
    {v.name: v for v in _OWN},
    ("eager", "torch", "torch-p0", "xtrain", "xtrain-p0", "xtrain-eager"),
    num_blocks=9,
    num_losses=10,
)
KINDS = {
    "transformer": _COMPARED,
    "gpt2": _COMPARED,  # as nanoGPT writes it, with dropout modules of its own
    "llama": Kind(
        {v.name: v for v in _LLAMA},
        ("torch", "liger", "xtrain", "xtrain-p0", "own", "blocks"),
        num_blocks=7,
        num_losses=4,
        curves=True,
    ),
}
OWN_KINDS = ("transformer", "gpt2")

# batch and seq that a preset is measured at unless told otherwise. `small`: short enough that a
# whole run fits four minutes of two cores; the others fill one large GPU without recompute.
SHAPES: dict[str, tuple[int, int]] = {
    "tiny": (8, 64),
    "small": (4, 256),
    "124m": (32, 1024),
    "350m": (16, 1024),
    "1b": (8, 2048),
    "8b": (1, 2048),
}


@dataclass(frozen=True)
class LlamaShape:
    """A Llama by the names of transformers' LlamaConfig, and how much of it a step takes."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    batch: int
    seq: int

    @property
    def sizes(self) -> dict[str, int]:
        """Return the fields of LlamaConfig."""
        return {k: v for k, v in vars(self).items() if k not in ("batch", "seq")}


LLAMA_SHAPES = {
    "1b": LlamaShape(2048, 5632, 22, 32, 4, 32000, 8, 2048),
    "124m": LlamaShape(768, 2048, 12, 12, 12, 50304, 32, 1024),
    "small": LlamaShape(256, 704, 4, 4, 2, 2048, 4, 256),
    "tiny": LlamaShape(64, 128, 2, 2, 1, 512, 2, 32),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One model, shape, data and dropout; the same for every variant of a run.

    preset:  of xtrain.model, or of LLAMA_SHAPES, which `shape` then is with the flags' changes.
    dtype:   "fp32", or "bf16": autocast over fp32 weights.
    threads: of torch on the CPU; None: its own default.
    """

    preset: str
    batch: int
    seq: int
    vocab: int
    dropout: float
    device: str
    dtype: str
    model: str = "transformer"  # of KINDS
    shape: LlamaShape | None = None
    recompute: str | int = "none"
    learning_rate: float = 1e-3
    threads: int | None = None
    seed: int = 0

    @classmethod
    def of(cls, flags: Namespace, device: str, usual: Mapping[str, Any], **settled: Any) -> Setting:
        """Return what is settled, else what flags of the fields' names say, else what is usual."""
        named = {item.name: getattr(flags, item.name, None) for item in fields(cls)}
        given = {name: value for name, value in named.items() if value is not None}
        dtype = "bf16" if device.startswith("cuda") else "fp32"
        return cls(**{"dtype": dtype, **usual, **given, **settled, "device": device})

    @property
    def kind(self) -> Kind:
        return KINDS[self.model]

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq

    @property
    def device_type(self) -> str:
        return self.device.partition(":")[0]

    def __str__(self) -> str:
        dtype = "bf16 autocast, fp32 weights" if self.dtype == "bf16" else self.dtype
        sizes = f"B{self.batch} S{self.seq} V{self.vocab}, {dtype}"
        if (s := self.shape) is not None:
            heads = f"{s.num_attention_heads}/{s.num_key_value_heads}"
            return (
                f"Llama {self.preset} (hidden {s.hidden_size}, {s.num_hidden_layers} layers, "
                f"{heads} heads, ffn {s.intermediate_size}), {sizes}, dropout {self.dropout:g} "
                f"where the row says so, fused AdamW, {self.device_type}"
            )
        preset = self.preset if self.model == "transformer" else f"{self.preset} as {self.model}"
        return (
            f"preset {preset}, {sizes}, dropout {self.dropout:g}, recompute {self.recompute}, "
            f"fused AdamW, {self.device_type}"
        )
