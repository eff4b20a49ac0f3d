"""Fine-tune a Hugging Face causal LM in a loop of your own.

    python examples/bare_loop.py
    python examples/bare_loop.py --model FOLDER --data FILE --learning-rate 2e-5

The model is transformers' own, unchanged: one line puts dropout on its residual branches. set_step
names the step and the first row that each forward holds, so that cutting a batch into other
micro-batches (--batch 8 --accumulate 1, --batch 2 --accumulate 4) draws the same mask for each row.
"""

from __future__ import annotations

import argparse
import sys

import torch
from common import Outcome, SiteCounter, build_model, check_saved, load_rows, output_folder, parser
from torch import Tensor
from transformers import AutoModelForCausalLM

import xtrain
from xtrain.command_line import exit_codes
from xtrain.compiler import CompiledModel


def train(compiled: CompiledModel, rows: Tensor, arguments: argparse.Namespace) -> list[float]:
    """Run the optimiser steps and return the loss of each."""
    optimizer = torch.optim.AdamW(
        compiled.parameters(), lr=arguments.learning_rate, weight_decay=0.0
    )
    losses = []
    compiled.train()
    for step, batch in enumerate(rows.split(arguments.batch * arguments.accumulate)):
        total = 0.0
        for micro, part in enumerate(batch.split(arguments.batch)):
            compiled.set_step(step, first_sample=micro * arguments.batch)
            loss = compiled(input_ids=part, labels=part).loss / arguments.accumulate
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@torch.no_grad()
def evaluate(compiled: CompiledModel, rows: Tensor, arguments: argparse.Namespace) -> float:
    """Return the mean loss over rows, without dropout."""
    compiled.eval()
    losses = [compiled(input_ids=part, labels=part).loss for part in rows.split(arguments.batch)]
    return torch.stack(losses).mean().item()


def run(arguments: argparse.Namespace) -> Outcome:
    """Train, evaluate twice, save and load again."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_model(arguments).to(device)
    compiled = xtrain.compile(
        model, dropout=arguments.dropout, seed=arguments.seed, backend=arguments.backend
    )
    sites = SiteCounter(compiled)
    rows, held_out = (part.to(device) for part in load_rows(arguments))

    losses = train(compiled, rows, arguments)
    evaluations = [evaluate(compiled, held_out, arguments) for _ in range(2)]

    folder = output_folder(arguments, "bare_loop")
    compiled.save_pretrained(folder)  # the model's own method: names without prefix
    saved = check_saved(model, AutoModelForCausalLM.from_pretrained(folder), folder)
    return Outcome(losses, evaluations, sites, len(compiled.report().sites), folder, [saved])


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, run, print."""
    arguments = parser("Fine-tune a Hugging Face causal LM in a bare loop.").parse_args(argv)
    with exit_codes() as status:
        print(run(arguments))
    return status.code


if __name__ == "__main__":
    sys.exit(main())
