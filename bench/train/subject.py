"""One variant of the training step, to be stepped, timed and asked; lives in a worker process."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench import harness
from bench.train import models
from bench.train.variants import Setting
from xtrain import metrics, torch_compat

NUM_RANDOM, NUM_TEXT = 10, 256  # batches, cycled through


class Subject:
    """The training step of one variant: forward, backward, optimiser; the same data for all."""

    def __init__(self, setting: Setting, variant_name: str):
        self.setting = setting
        self.variant = setting.kind.variants[variant_name]
        self.device = torch.device(setting.device)
        if setting.threads is not None:
            torch.set_num_threads(setting.threads)
        with self.device:  # a billion weights are drawn in a second there, in half a minute here
            self.inner = models.build(setting, self.variant).train()
        self.model = models.wrap(self.inner, self.variant, setting.dropout, setting.seed)
        self.optimizer = torch.optim.AdamW(
            self.inner.parameters(), lr=setting.learning_rate, fused=True
        )
        # models of transformers shift the labels themselves, and so have one target less
        self.shifts_labels = self.variant.build in ("hf", "liger")
        batches = text_batches if setting.model == "llama" else random_batches
        # On the device before anything is timed: a copy from pageable memory may wait for the GPU.
        self.batches = [self._tokens_and_targets(ids.to(self.device)) for ids in batches(setting)]
        self.losses: list[Tensor] = []
        self.num_graphs_at_first = 0

    def _tokens_and_targets(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        tokens = ids[:, :-1].contiguous()
        return tokens, tokens if self.shifts_labels else ids[:, 1:].contiguous()

    def step(self) -> Tensor:
        """Perform one training step and return its loss, on the device."""
        tokens, targets = self.batches[len(self.losses) % len(self.batches)]
        self.optimizer.zero_grad(set_to_none=True)
        with models.autocast(self.setting):
            if self.shifts_labels:
                loss = self.model(input_ids=tokens, labels=targets, use_cache=False).loss
            elif self.setting.model == "gpt2":
                # nanoGPT's loop holds the logits until the loss is there: what that costs is part
                _, loss = self.model(tokens, targets)
            else:
                _, loss = self.model(tokens, targets, return_logits=False)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())
        return self.losses[-1]

    # --- what the parent asks for, each answer plain data -------------------------------------

    def ready(self) -> None:
        """Answer once everything is built."""

    def first_steps(self, num_steps: int) -> dict[str, Any]:
        """Run the first steps from the common initial weights; the first one compiles."""
        self._synchronize()
        start = time.perf_counter()
        self.step().item()
        found: dict[str, Any] = {"first_step_s": time.perf_counter() - start}
        self.num_graphs_at_first = torch_compat.num_compiled_graphs()
        for _ in range(num_steps - 1):
            self.step()
        found["losses"] = torch.stack(self.losses).tolist()
        self._rest()
        if self.variant.compiler.startswith("xtrain"):
            report = self.model.report()
            found["passes_ms"] = sum(result.time_ms for result in report.passes)
            found["num_sites"] = len(report.sites)
            found["swaps"] = {
                result.name: f"{result.num_replaced} of {result.num_matched}"
                for result in report.passes
                if result.num_matched and result.name.startswith(("use_", "fuse_"))
            }
            found["report"] = str(report)
        return found

    def visit(self, num_warm_up: int, num_steps: int) -> list[float]:
        """Return the times of num_steps steps in ms, after some that do not count."""
        for _ in range(num_warm_up):
            self.step()
        times = harness.time_calls(self.step, num_steps, self.device.type)
        self._rest()
        return times

    def finish(self) -> dict[str, Any]:
        """Return what is known once timing is over, where asked for the losses of all steps."""
        num_graphs = torch_compat.num_compiled_graphs()
        found: dict[str, Any] = {
            "num_graphs": self.num_graphs_at_first,
            "num_recompiles": num_graphs - self.num_graphs_at_first,
        }
        if self.setting.kind.curves:
            found["losses"] = torch.stack(self.losses).tolist()
        found["peak_memory_gib"] = self._peak_memory_gib()
        self._rest()
        return found

    def kernels(self, num_steps: int) -> dict[str, tuple[float, float]]:
        """Return kernel (on a CPU: operator) -> (calls a step, ms a step), compilation left out."""
        for _ in range(3):
            self.step()
        self._synchronize()
        on_gpu = self.device.type == "cuda"
        activity = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU]) as run:
            for _ in range(num_steps):
                self.step()
            self._synchronize()
        self._rest()
        microseconds = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        return {
            event.key: (event.count / num_steps, time_us / num_steps / 1e3)
            for event in run.key_averages()
            if (time_us := getattr(event, microseconds)) > 0
        }

    def masks(self) -> dict[str, Any]:
        """Return the masks that this variant draws, read off a small model."""
        return models.read_masks(self.variant, self.setting)

    def environment(self, commit: str | None) -> dict[str, Any]:
        """Return the machine and versions."""
        found = harness.environment(self.device.type, commit)
        if self.setting.model == "llama":
            for module in ("transformers", "liger_kernel"):
                found[module] = harness.version_of(module)
        return found

    def _peak_memory_gib(self) -> float:
        """The most that tensors held in one step: weights, optimiser state, activations, gradients.

        The step runs once more for it. CUDA: max_memory_allocated. CPU: what is held between steps
        plus the peak of what torch's allocator gave out during the step.
        """
        if self.device.type == "cuda":
            metrics.reset_peak_memory(self.device)
            self.step()
            self._synchronize()
            return metrics.peak_memory_gib(self.device)
        held = [*self.inner.parameters(), *self.inner.buffers()]
        held += [t for pair in self.batches for t in pair]
        held += [t for state in self.optimizer.state.values() for t in state.values()]
        resident = sum({t.data_ptr(): t.nbytes for t in held if torch.is_tensor(t)}.values())
        gc.collect()
        return (resident + harness.cpu_tensor_peak_bytes(self.step)) / harness.GIB

    def _rest(self) -> None:
        """Leave the device to the other workers: together their activations may not fit it."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def random_batches(setting: Setting) -> list[Tensor]:
    """Return [batch, seq + 1] of random tokens."""
    generator = torch.Generator().manual_seed(setting.seed)
    size = (NUM_RANDOM, setting.batch, setting.seq + 1)
    return list(torch.randint(setting.vocab, size, generator=generator))


def text_batches(setting: Setting) -> list[Tensor]:
    """Return [batch, seq + 1] of bytes of the running Python's standard library, at random places.

    One token more than a step takes: xtrain's own model is handed its targets.
    """
    from xtrain.data.sources import list_stdlib

    text = b"".join(Path(source.path).read_bytes() for source in list_stdlib().sources)
    data = np.frombuffer(text, dtype=np.uint8)
    generator = np.random.Generator(np.random.PCG64(setting.seed))
    starts = generator.integers(0, len(data) - setting.seq, (NUM_TEXT, setting.batch))
    windows = data[starts[..., None] + np.arange(setting.seq + 1)]
    return [torch.from_numpy(batch.astype(np.int64)) for batch in windows]
