"""Fingerprints of a training run: every N steps, what went in, each op, what came out.

A compiled step cannot be watched from inside. The ops are those of an extra forward and backward of
the plain model on the step's first micro-batch, without dropout, with the same weights. A site's
mask is a function of (seed, step, site) and its first decisions are drawn once more: if ops and
masks are equal in two runs and the loss is not, the difference lies in what was compiled. It moves
no generator and leaves no gradient, so that a run is bitwise the same with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from xtrain import torch_compat
from xtrain.drift.recording.environment import collect
from xtrain.drift.recording.observe import Observer, OpSink, Origins
from xtrain.drift.recording.tensors import fingerprint, json_number, write_json
from xtrain.drift.recording.training_format import (
    FORMAT,
    VERSION,
    Row,
    checksum,
    rank_folder,
    step_file,
)
from xtrain.drift.recording.writing import to_bits
from xtrain.ops import dropout
from xtrain.rng import site_seed
from xtrain.training.update import named_state

if TYPE_CHECKING:
    from xtrain.compiler.compile_report import Site
    from xtrain.training.loop import Trainer

DECISIONS = 4096  # of a mask, which a fingerprint is of


class TrainingFingerprints:
    """Writes the fingerprints of one rank; call `before` and `after` around each step."""

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        *,
        every: int,
        autocast: Callable[[], AbstractContextManager],
        first_step: int = 0,
        rank: int = 0,
        configuration: Mapping[str, Any] | None = None,
        optimizer_state: Callable[[], Mapping[str, Tensor]] = dict,
        masks: Callable[[int], Mapping[str, Tensor]] = lambda step: {},
    ):
        self.folder = rank_folder(folder, rank)
        self.model, self.every, self.autocast, self.rank = model, every, autocast, rank
        self.optimizer_state = optimizer_state  # name -> tensor
        self.masks = masks  # of a step: site -> decisions
        self.rows: list[Row] = []
        self.formulas: list[list[Any]] = []  # of the ops
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob("step_*.json"):  # of a run that is continued from before them
            if int(path.stem.removeprefix("step_")) >= first_step:
                path.unlink()
        start = {
            "format": FORMAT,
            "version": VERSION,
            "rank": rank,
            "environment": collect(),
            "configuration": dict(configuration or {}),
            "weights": [name for name, _ in model.named_parameters()],
        }
        write_json(self.folder / "start.json", {**start, "xxh3_128": checksum(start)})

    def due(self, step: int) -> bool:
        """Return whether a step is recorded."""
        return step % self.every == 0

    def before(self, step: int, inputs: Tensor, targets: Tensor) -> None:
        """Record what a step starts from, and the ops of its first micro-batch."""
        if not self.due(step):
            return
        self.rows, self.formulas = [], []
        self._add("input", "tokens", "", inputs)
        self._add("input", "targets", "", targets)
        for name, parameter in self.model.named_parameters():
            self._add("weight", name, "before the step", parameter)
        for name, tensor in self.optimizer_state().items():
            self._add("optimizer", name, "before the step", tensor)
        observer = _TrainingObserver(self, Origins(self.model, (inputs, targets)))
        with observer.hooks(self.model), observer, torch.enable_grad(), self.autocast():
            _, loss = self.model(inputs, targets, return_logits=False)
            parameters = [p for p in self.model.parameters() if p.requires_grad]
            torch.autograd.grad(loss, parameters)

    def after(self, step: int, loss: float, grad_norm: float) -> None:
        """Record what a step has done: loss, gradients after clipping, weights."""
        if not self.due(step):
            return
        for name, tensor in self.masks(step).items():
            self._add("mask", name, "", tensor)
        self._add("loss", "", "", torch.tensor(loss))
        self._add("gradient norm", "", "", torch.tensor(grad_norm))
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                self._add("gradient", name, "of the step", parameter.grad)
        for name, parameter in self.model.named_parameters():
            self._add("weight", name, "after the step", parameter)
        contents = {
            "step": step,
            "rank": self.rank,
            "loss": json_number(loss),
            "rows": self.rows,
            "formulas": self.formulas,
        }
        write_json(step_file(self.folder, step), {**contents, "xxh3_128": checksum(contents)})
        self.rows = []

    def add_op(
        self, path: str, op: str, tensor: Tensor, operands: Sequence[int] = (), arguments: str = ""
    ) -> int:
        """Take the result of an op of the extra forward and backward; return its number."""
        self._add("op", path, op, tensor)
        self.formulas.append([list(operands), arguments])
        return len(self.formulas) - 1

    def _add(self, kind: str, path: str, op: str, tensor: Tensor) -> None:
        bits, dtype = to_bits(tensor)
        mark = fingerprint(bits, dtype)
        statistics = [json_number(value) for value in mark.statistics[:4]]
        shape = list(bits.shape)
        self.rows.append(Row(kind, path, op, dtype, shape, mark.hash.hex(), statistics))


class _TrainingObserver(Observer):
    """Names ops by module in forward, and by the module of their forward op in backward."""

    def __init__(self, sink: OpSink, origins: Origins):
        super().__init__(sink, origins)
        self.path_of: dict[int, str] = {}  # autograd node -> the module that made it

    def place(self) -> str:
        """Return the module whose op is running, forward or backward."""
        if torch_compat.in_backward():
            number = torch_compat.running_sequence_number()
            path = self.path_of.get(-1 if number is None else number, "")
            return f"{path} (backward)".strip()
        self.path_of[torch_compat.last_sequence_number()] = super().place()
        return super().place()


def fingerprints_of(trainer: Trainer) -> TrainingFingerprints:
    """Return what writes the fingerprints of a run beside its steps, as its configuration says."""
    config = trainer.config
    return TrainingFingerprints(
        trainer.run_folder.drift,
        trainer.model,
        every=config.run.drift_every,
        autocast=trainer.autocast,
        first_step=trainer.first_step,
        rank=torch.distributed.get_rank() if torch.distributed.is_initialized() else 0,
        configuration=config.to_dict(),
        optimizer_state=lambda: named_state(trainer.optimizer, trainer.saver.names),
        masks=lambda step: masks_of(
            trainer.compiled.report().sites,
            config.model.dropout,
            config.train.seed,
            step,
            trainer.device,
        ),
    )


def masks_of(
    sites: Sequence[Site], p: float, seed: int, step: int, device: torch.device
) -> dict[str, Tensor]:
    """Return, of each site that xtrain drops out, the first decisions of its mask at a step."""
    ones = torch.ones(DECISIONS, device=device)
    return {
        site.name: dropout(ones, p, site_seed(seed, step, site.layer, site.site)) > 0
        for site in sites
        if site.dropout == "xtrain"
    }
