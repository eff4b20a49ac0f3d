"""One variant of the training step, to be stepped, timed and asked; lives in a worker process."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from torch import Tensor

from bench import harness, models, probe
from bench.variants import VARIANTS, Setting
from xtrain import metrics, torch_compat

LEARNING_RATE = 1e-3
NUM_BATCHES = 10  # cycled through


class Subject:
    """The training step of one variant: forward, backward, optimiser; the same data for all."""

    def __init__(self, setting: Setting, variant_name: str):
        self.setting = setting
        self.variant = VARIANTS[variant_name]
        self.device = torch.device(setting.device)
        if setting.threads is not None:
            torch.set_num_threads(setting.threads)
        torch.manual_seed(setting.seed)
        with self.device:
            model = models.build(setting, self.variant)
        self.model: Any = models.wrap(model, self.variant, setting.dropout, setting.seed)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        generator = torch.Generator().manual_seed(setting.seed)
        size = (NUM_BATCHES, setting.batch, setting.seq + 1)
        data = torch.randint(setting.vocab, size, generator=generator).to(self.device)
        self.batches = [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in data]
        # nanoGPT's loop holds the logits until the loss is there: what that costs is part of it
        self.options = {} if setting.model == "gpt2" else {"return_logits": False}
        self.num_steps = 0
        self.num_graphs_at_first = 0

    def step(self) -> Tensor:
        """Perform one training step and return its loss, on the device."""
        tokens, targets = self.batches[self.num_steps % NUM_BATCHES]
        self.num_steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        with models.autocast(self.setting):
            _, loss = self.model(tokens, targets, **self.options)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    # --- what the parent asks for, each answer plain data -------------------------------------

    def ready(self) -> None:
        """Answer once everything is built."""

    def first_steps(self, num_steps: int) -> dict[str, Any]:
        """Run the first steps from the common initial weights; the first one compiles."""
        self._synchronize()
        start = time.perf_counter()
        losses = [self.step().item()]
        first_step_s = time.perf_counter() - start
        self.num_graphs_at_first = torch_compat.num_compiled_graphs()
        losses += [self.step().item() for _ in range(num_steps - 1)]
        self._rest()
        found = {"losses": losses, "first_step_s": first_step_s}
        if self.variant.compiler == "xtrain":
            report = self.model.report()
            found["passes_ms"] = sum(result.time_ms for result in report.passes)
            found["num_sites"] = len(report.sites)
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
        """Return what is known once timing is over."""
        num_graphs = torch_compat.num_compiled_graphs()
        found = {
            "num_graphs": self.num_graphs_at_first,
            "num_recompiles": num_graphs - self.num_graphs_at_first,
            "peak_memory_gib": self._peak_memory_gib(),
        }
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
        """Return the masks that this variant draws, read off a small model (probe.py)."""
        return probe.read_masks(self.variant, self.setting)

    def environment(self, commit: str | None) -> dict[str, Any]:
        """Return the machine and versions."""
        return harness.environment(self.device.type, commit)

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
        held = [*self.model.parameters(), *self.model.buffers()]
        held += [t for state in self.optimizer.state.values() for t in state.values()]
        held += [t for pair in self.batches for t in pair]
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
