"""What bench/compare.py measures: the setting of a run and the variants of one training step.

No torch here: the parent process and `--help` read this, worker processes build it (subject.py).
"""

from __future__ import annotations

from dataclasses import dataclass

# xtrain's own model without dropout, or a nanoGPT-like GPT-2 with dropout modules of its own
MODELS = ("transformer", "gpt2")


@dataclass(frozen=True)
class Setting:
    """One model, shape and dropout; the same for every variant of a run."""

    preset: str
    batch: int
    seq: int
    vocab: int
    dropout: float
    recompute: str | int
    device: str
    dtype: str  # "fp32", or "bf16": autocast over fp32 weights
    threads: int | None = None  # of torch on the CPU; None: its own default
    seed: int = 0
    subject: str = "bench.subject"  # the module whose Subject workers build
    model: str = "transformer"  # of MODELS

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq

    @property
    def device_type(self) -> str:
        return self.device.partition(":")[0]

    def __str__(self) -> str:
        dtype = "bf16 autocast, fp32 weights" if self.dtype == "bf16" else self.dtype
        preset = self.preset if self.model == "transformer" else f"{self.preset} as {self.model}"
        return (
            f"preset {preset}, B{self.batch} S{self.seq} V{self.vocab}, {dtype}, dropout "
            f"{self.dropout:g}, recompute {self.recompute}, fused AdamW, {self.device_type}"
        )


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
class Variant:
    """One way to run the training step.

    label:      its name in the table.
    compiler:   "" | "torch" | "xtrain".
    backend:    of xtrain.compile.
    dropout:    "" | "F.dropout" (called by the model on both branches) | "xtrain" (inserted).
    reference:  the variant whose losses it is held to; with dropout from xtrain it has the same
                masks, with F.dropout other ones.
    """

    name: str
    label: str
    compiler: str
    dropout: str
    reference: str
    backend: str = "inductor"
    options: tuple[tuple[str, object], ...] = ()  # of inductor, for xtrain.compile
    logits: str = "keep"  # of xtrain.compile, as the next
    disable_passes: tuple[str, ...] = ()


VARIANTS: dict[str, Variant] = {
    v.name: v
    for v in (
        Variant("eager", "eager + F.dropout", "", "F.dropout", "eager"),
        Variant("torch", "torch.compile + F.dropout", "torch", "F.dropout", "eager"),
        Variant("torch-p0", "torch.compile, no dropout", "torch", "", "eager-p0"),
        Variant("xtrain", "xtrain.compile, dropout", "xtrain", "xtrain", "xtrain-eager"),
        Variant("xtrain-p0", "xtrain.compile, no dropout", "xtrain", "", "eager-p0"),
        Variant(
            "xtrain-eager", "xtrain eager, dropout", "xtrain", "xtrain", "xtrain-eager", "eager"
        ),
        Variant(
            "xtrain-fused-rounding",
            "xtrain.compile, dropout, fused rounding",
            "xtrain",
            "xtrain",
            "xtrain-eager",
            options=(("emulate_precision_casts", False),),
        ),
        Variant(
            "xtrain-torch-sdpa",
            "xtrain.compile, dropout, torch's attention",
            "xtrain",
            "xtrain",
            "xtrain-eager",
            disable_passes=("use_triton_sdpa",),
        ),
        Variant(
            "xtrain-drop",
            "xtrain.compile, dropout, logits dropped",
            "xtrain",
            "xtrain",
            "xtrain-eager",
            logits="drop",
        ),
        Variant("eager-p0", "eager, no dropout", "", "", "eager-p0"),
    )
}
# eager-p0 is run for its losses alone unless asked for; those not named here price an option.
DEFAULT_VARIANTS = ("eager", "torch", "torch-p0", "xtrain", "xtrain-p0", "xtrain-eager")
