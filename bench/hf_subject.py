"""One way to train a Llama on real text, to be stepped, timed and asked; in a worker process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import xtrain
from bench import harness, subject
from bench.hf_variants import VARIANTS, Setting
from xtrain import torch_compat
from xtrain.data.sources import list_stdlib
from xtrain.model import Config, Transformer


class Subject(subject.Subject):
    """The training step of one variant; every step's loss is kept."""

    def __init__(self, setting: Setting, variant_name: str):
        self.setting = setting  # type: ignore[assignment]
        self.variant = VARIANTS[variant_name]  # type: ignore[assignment]
        self.device = torch.device(setting.device)
        with self.device:  # a billion weights are drawn in a second there, in half a minute here
            self.inner = build(setting, self.variant.model).train()
        self.model: Any = self._wrapped()
        self.optimizer = torch.optim.AdamW(
            self.inner.parameters(), lr=setting.learning_rate, fused=True
        )
        # On the device before anything is timed: a copy from pageable memory may wait for the GPU.
        self.batches = [ids.to(self.device) for ids in text_batches(setting)]  # type: ignore[misc]
        self.losses: list[Tensor] = []
        self.num_steps = 0
        self.num_graphs_at_first = 0

    def _wrapped(self) -> Any:
        setting: Any = self.setting
        if self.variant.compiler == "torch":
            return torch.compile(self.inner)
        p = setting.dropout if self.variant.drops else 0.0
        if self.variant.compiler == "xtrain":
            return xtrain.compile(self.inner, dropout=p, seed=setting.seed, logits="drop")
        if self.variant.compiler == "xtrain-blocks":
            return xtrain.compiler.compile_blocks(self.inner, dropout=p, seed=setting.seed)
        return self.inner

    def step(self) -> Tensor:
        """Perform one training step and return its loss, on the device."""
        ids = self.batches[self.num_steps % len(self.batches)]
        self.num_steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(
            self.device.type, dtype=torch.bfloat16, enabled=self.setting.dtype == "bf16"
        ):
            tokens = ids[:, :-1].contiguous()
            if self.variant.model == "own":
                _, loss = self.model(tokens, ids[:, 1:].contiguous(), return_logits=False)
            else:  # which shifts the labels itself, and so has one target less
                loss = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())
        return self.losses[-1]

    def first_steps(self, num_steps: int) -> dict[str, Any]:
        """Run the first steps; the first one compiles."""
        self._synchronize()
        start = time.perf_counter()
        self.step().item()
        first_step_s = time.perf_counter() - start
        self.num_graphs_at_first = torch_compat.num_compiled_graphs()
        for _ in range(num_steps - 1):
            self.step()
        self._rest()
        found: dict[str, Any] = {"first_step_s": first_step_s}
        if self.variant.compiler.startswith("xtrain"):
            report = self.model.report()
            found["passes_ms"] = sum(result.time_ms for result in report.passes)
            found["num_sites"] = len(report.sites)
            found["swaps"] = {
                r.name: f"{r.num_replaced} of {r.num_matched}"
                for r in report.passes
                if r.num_matched and r.name.startswith(("use_", "fuse_"))
            }
            found["report"] = str(report)
        return found

    def finish(self) -> dict[str, Any]:
        """Return what is known once timing is over, the losses of all steps among it."""
        losses = torch.stack(self.losses).tolist()
        return {**super().finish(), "losses": losses}

    def environment(self, commit: str | None) -> dict[str, Any]:
        """Return the machine and versions."""
        found = harness.environment(self.device.type, commit)
        for module in ("transformers", "liger_kernel"):
            found[module] = harness.version_of(module)
        return found


def build(setting: Setting, kind: str) -> nn.Module:
    """Return the model in fp32 on the default device; equal weights for "hf" and "liger"."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = setting.shape
    torch.manual_seed(setting.seed)
    if kind == "own":
        return Transformer(
            Config(
                dim=shape.hidden_size,
                n_layers=shape.num_hidden_layers,
                n_heads=shape.num_attention_heads,
                n_kv_heads=shape.num_key_value_heads,
                ffn_hidden=shape.intermediate_size,
                vocab_size=shape.vocab_size,
                max_seq_len=shape.seq,
            )
        )
    sizes = {k: v for k, v in vars(shape).items() if k not in ("batch", "seq")}
    model = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=shape.seq))
    if kind == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(model=model)
    return model


def text_batches(setting: Setting, num_batches: int = 256) -> list[Tensor]:
    """Return [batch, seq + 1] of bytes of the running Python's standard library, at random places.

    One token more than a step takes: xtrain's own model is handed its targets.
    """
    text = b"".join(Path(source.path).read_bytes() for source in list_stdlib().sources)
    data = np.frombuffer(text, dtype=np.uint8)
    generator = np.random.Generator(np.random.PCG64(setting.seed))
    shape = setting.shape
    starts = generator.integers(0, len(data) - shape.seq, (num_batches, shape.batch))
    windows = data[starts[..., None] + np.arange(shape.seq + 1)]
    return [torch.from_numpy(batch.astype(np.int64)) for batch in windows]
