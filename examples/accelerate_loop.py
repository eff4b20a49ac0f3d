"""Fine-tune a Hugging Face causal LM with accelerate, on one process or several.

    python examples/accelerate_loop.py
    torchrun --nproc-per-node 2 examples/accelerate_loop.py --batch 2

Compile first, prepare afterwards: `prepare` puts DDP around the CompiledModel, and `unwrap_model`
gives the CompiledModel back. accelerate deals whole batches to the ranks in turn; set_step says
which rows of the global batch a rank holds, so two ranks with half of the batch each draw the
masks, and find the losses, of one process with the whole.
"""

from __future__ import annotations

import argparse
import sys

import torch
from accelerate import Accelerator, PartialState
from common import Outcome, SiteCounter, build_model, check_saved, load_rows, output_folder, parser
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import xtrain
from xtrain.command_line import exit_codes
from xtrain.compiler import CompiledModel


def train(
    accelerator: Accelerator, compiled: CompiledModel, loader: DataLoader, learning_rate: float
) -> list[float]:
    """Run the optimiser steps and return the loss of each, averaged over ranks."""
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=learning_rate, weight_decay=0.0)
    model, optimizer, loader = accelerator.prepare(compiled, optimizer, loader)
    assert accelerator.unwrap_model(model) is compiled
    micro_batches = accelerator.gradient_accumulation_steps
    losses: list[float] = []
    model.train()
    total = torch.zeros((), device=accelerator.device)
    for index, rows in enumerate(loader):
        step, micro = divmod(index, micro_batches)
        place = micro * accelerator.num_processes + accelerator.process_index
        compiled.set_step(step, first_sample=place * len(rows))
        with accelerator.accumulate(model):
            loss = model(input_ids=rows, labels=rows).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        total += loss.detach() / micro_batches
        if accelerator.sync_gradients:
            losses.append(accelerator.reduce(total, reduction="mean").item())
            total.zero_()
    return losses


@torch.no_grad()
def evaluate(accelerator: Accelerator, compiled: CompiledModel, loader: DataLoader) -> float:
    """Return the mean loss over the held-out rows of all ranks, without dropout."""
    compiled.eval()
    losses = [compiled(input_ids=rows, labels=rows).loss for rows in loader]
    return accelerator.gather(torch.stack(losses)).mean().item()


def run(arguments: argparse.Namespace) -> Outcome:
    """Train, evaluate twice, save and load again."""
    accelerator = Accelerator(
        gradient_accumulation_steps=arguments.accumulate,
        mixed_precision=arguments.mixed_precision,
        cpu=not torch.cuda.is_available(),
    )
    model = build_model(arguments)
    compiled = xtrain.compile(
        model, dropout=arguments.dropout, seed=arguments.seed, backend=arguments.backend
    )
    sites = SiteCounter(compiled)
    rows, held_out = load_rows(arguments, accelerator.num_processes)
    loader = DataLoader(rows, batch_size=arguments.batch)

    losses = train(accelerator, compiled, loader, arguments.learning_rate)
    held_out_loader = accelerator.prepare(DataLoader(held_out, batch_size=arguments.batch))
    evaluations = [evaluate(accelerator, compiled, held_out_loader) for _ in range(2)]

    folder = output_folder(arguments, "accelerate_loop")
    notes = [
        f"{accelerator.num_processes} process(es), mixed precision: {arguments.mixed_precision}"
    ]
    compiled.save_pretrained(
        folder, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    accelerator.wait_for_everyone()
    notes.append(check_saved(model, AutoModelForCausalLM.from_pretrained(folder), folder))
    accelerator.end_training()
    return Outcome(losses, evaluations, sites, len(compiled.report().sites), folder, notes)


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, run, print on the first rank."""
    flags = parser("Fine-tune a Hugging Face causal LM with accelerate.")
    flags.add_argument("--mixed-precision", choices=["no", "bf16"], default="no")
    arguments = flags.parse_args(argv)
    with exit_codes() as status:
        outcome = run(arguments)
        if PartialState().is_main_process:
            print(outcome)
    return status.code


if __name__ == "__main__":
    sys.exit(main())
