"""Fine-tune a Hugging Face causal LM as a LightningModule.

    python examples/lightning_module.py

The CompiledModel is an attribute of the LightningModule, as any nn.Module. Lightning counts
batches, not forwards of a step: the step is its global_step and the place within the step the batch
index modulo accumulate_grad_batches. Lightning deals single rows to several ranks in turn, so that
a rank's rows are not neighbours: masks are still distinct for all rows, but which mask a row gets
depends on the number of ranks. The model's names in Lightning's checkpoints begin with "model.", as
for any attribute of that name; save_pretrained writes them without.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings

import pytorch_lightning as lightning
import torch
from common import Outcome, SiteCounter, build_model, check_saved, load_rows, output_folder, parser
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import xtrain
from xtrain.command_line import exit_codes
from xtrain.compiler import CompiledModel


class FineTuning(lightning.LightningModule):
    """Next-token loss of a compiled causal LM."""

    def __init__(self, compiled: CompiledModel, learning_rate: float):
        super().__init__()
        self.model = compiled
        self.learning_rate = learning_rate
        self.losses: list[float] = []
        self._total = 0.0

    def training_step(self, rows: Tensor, index: int) -> Tensor:
        micro_batches = self.trainer.accumulate_grad_batches
        micro = index % micro_batches
        place = micro * self.trainer.world_size + self.trainer.global_rank
        self.model.set_step(self.trainer.global_step, first_sample=place * len(rows))
        loss = self.model(input_ids=rows, labels=rows).loss
        self._total += loss.item() / micro_batches
        if micro == micro_batches - 1:
            self.losses.append(self._total)
            self._total = 0.0
        return loss

    def validation_step(self, rows: Tensor, index: int) -> None:
        loss = self.model(input_ids=rows, labels=rows).loss
        self.log("held_out", loss, batch_size=len(rows), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.0)


def build_trainer(arguments: argparse.Namespace) -> lightning.Trainer:
    """Return a Trainer that only trains: no progress bar, loggers or checkpoints of its own."""
    warnings.filterwarnings("ignore", module="pytorch_lightning")  # advice on loader workers
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    return lightning.Trainer(
        max_steps=arguments.steps,
        accumulate_grad_batches=arguments.accumulate,
        accelerator="auto",
        devices=1,
        default_root_dir=output_folder(arguments, "lightning_module"),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,  # evaluated by hand below
    )


def run(arguments: argparse.Namespace) -> Outcome:
    """Train, evaluate twice, save and load again."""
    # from_pretrained gives a model in eval mode, and Lightning trains in the mode that it finds
    model = build_model(arguments).train()
    compiled = xtrain.compile(
        model, dropout=arguments.dropout, seed=arguments.seed, backend=arguments.backend
    )
    sites = SiteCounter(compiled)
    rows, held_out = load_rows(arguments)
    module = FineTuning(compiled, arguments.learning_rate)
    trainer = build_trainer(arguments)

    trainer.fit(module, DataLoader(rows, batch_size=arguments.batch))
    trainer.limit_val_batches = 1.0
    held_out_loader = DataLoader(held_out, batch_size=arguments.batch)
    evaluations = [
        trainer.validate(module, held_out_loader, verbose=False)[0]["held_out"] for _ in range(2)
    ]

    folder = output_folder(arguments, "lightning_module")
    module.model.save_pretrained(folder)
    saved = check_saved(model, AutoModelForCausalLM.from_pretrained(folder), folder)
    return Outcome(module.losses, evaluations, sites, len(compiled.report().sites), folder, [saved])


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, run, print."""
    flags = parser("Fine-tune a Hugging Face causal LM as a LightningModule.")
    arguments = flags.parse_args(argv)
    with exit_codes() as status:
        print(run(arguments))
    return status.code


if __name__ == "__main__":
    sys.exit(main())
