"""What bench/compare_hf.py measures: the setting of a run and the ways to train one Llama.

No torch here: the parent process and `--help` read this, workers build it (hf_subject.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A Llama by the names of transformers' LlamaConfig, and how much of it a step takes."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    batch: int
    seq: int


SHAPES = {
    "1b": Shape(2048, 5632, 22, 32, 4, 32000, 8, 2048),
    "124m": Shape(768, 2048, 12, 12, 12, 50304, 32, 1024),
    "small": Shape(256, 704, 4, 4, 2, 2048, 4, 256),
    "tiny": Shape(64, 128, 2, 2, 1, 512, 2, 32),
}


@dataclass(frozen=True)
class Setting:
    """One shape, data and dropout; the same for every variant of a run."""

    name: str
    shape: Shape
    dropout: float
    device: str
    dtype: str  # "fp32", or "bf16": autocast over fp32 weights
    learning_rate: float
    seed: int = 0
    subject: str = "bench.hf_subject"

    @property
    def tokens_per_step(self) -> int:
        return self.shape.batch * self.shape.seq

    @property
    def device_type(self) -> str:
        return self.device.partition(":")[0]

    def __str__(self) -> str:
        s = self.shape
        dtype = "bf16 autocast, fp32 weights" if self.dtype == "bf16" else self.dtype
        heads = f"{s.num_attention_heads}/{s.num_key_value_heads}"
        return (
            f"Llama {self.name} (hidden {s.hidden_size}, {s.num_hidden_layers} layers, {heads} "
            f"heads, ffn {s.intermediate_size}), B{s.batch} S{s.seq} V{s.vocab_size}, {dtype}, "
            f"dropout {self.dropout:g} where the row says so, fused AdamW, {self.device_type}"
        )


@dataclass(frozen=True)
class Variant:
    """One way to train the model.

    model:    "hf": transformers' LlamaForCausalLM, unchanged; "liger": the same, patched by
              Liger-Kernel; "own": xtrain.model.Transformer of the same shape.
    compiler: "" | "torch" | "xtrain" (with logits="drop") | "xtrain-blocks" (compile_blocks).
    drops:    whether xtrain inserts dropout.
    timed:    False for one that is run for its first step alone.
    """

    name: str
    label: str
    model: str
    compiler: str
    drops: bool = False
    timed: bool = True


VARIANTS: dict[str, Variant] = {
    v.name: v
    for v in (
        Variant("eager", "transformers", "hf", ""),
        Variant("torch", "transformers + torch.compile", "hf", "torch"),
        Variant("liger", "transformers + Liger", "liger", ""),
        Variant("liger-torch", "transformers + Liger + torch.compile", "liger", "torch"),
        Variant("xtrain", "transformers + xtrain.compile, dropout", "hf", "xtrain", True),
        Variant("xtrain-p0", "transformers + xtrain.compile, no dropout", "hf", "xtrain"),
        Variant("own", "xtrain's Transformer + xtrain.compile, dropout", "own", "xtrain", True),
        Variant(
            "blocks", "transformers + xtrain.compile_blocks", "hf", "xtrain-blocks", True, False
        ),
    )
}
DEFAULT_VARIANTS = ("torch", "liger", "xtrain", "xtrain-p0", "own", "blocks")

# (faster, baseline, least ratio of speeds): what the project promises at the 1b shape on one GPU.
CLAIMS = (("xtrain", "torch", 1.20), ("xtrain", "liger", 1.12), ("xtrain", "own", 0.98))
MAX_PASS_SHARE = 0.05  # of torch.compile's own first step
MAX_BLOCKS_SHARE = 0.5  # compile_blocks' first step / that of xtrain.compile on the whole model
CLAIMED = "1b"
