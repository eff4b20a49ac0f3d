"""What the four examples share: flags, a model, rows of text, and the count of executed sites.

Nothing here is about xtrain's interface; the examples themselves show that. All four train on the
same rows in the same order, so that their losses can be laid side by side.
"""

from __future__ import annotations

import argparse
import random
import textwrap
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from xtrain.command_line import Parser
from xtrain.compiler import CompiledModel
from xtrain.config import ConfigError

HELD_OUT = 16  # rows, whatever the batch: other cuts of a batch must train on the same rows
LIBRARY_SOURCES = [Path(module.__file__) for module in (argparse, random, textwrap, typing)]


def parser(description: str) -> argparse.ArgumentParser:
    """Return the flags that all examples share."""
    flags = Parser(description=description)
    add = flags.add_argument
    add(
        "--model", type=Path, metavar="FOLDER", help="saved causal LM; default: a tiny random Llama"
    )
    add("--data", type=Path, metavar="FILE", help="text, UTF-8; default: sources of Python itself")
    add("--output", type=Path, metavar="FOLDER", help="where to save; default: runs/examples/NAME")
    add("--steps", type=positive, default=20, help="optimiser steps (20)")
    add("--batch", type=positive, default=4, help="rows per forward and process (4)")
    add("--accumulate", type=positive, default=2, help="forwards per optimiser step (2)")
    add("--length", type=positive, default=64, help="tokens per row (64)")
    add("--learning-rate", type=float, default=3e-3, help="0.003 suits the tiny model alone")
    add("--dropout", type=float, default=0.1, help="probability at each residual site (0.1)")
    add("--seed", type=int, default=0, help="of the weights, the rows and the masks (0)")
    add("--backend", default="inductor", help="inductor | aot_eager | eager")
    return flags


def positive(text: str) -> int:
    """Parse a whole number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; give a whole number of 1 or more")
    return int(text)


def build_model(arguments: argparse.Namespace) -> PreTrainedModel:
    """Load the model of --model, or make a tiny Llama over bytes from its configuration."""
    disable_progress_bar()
    torch.manual_seed(arguments.seed)
    if arguments.model is not None:
        if not (arguments.model / "config.json").is_file():
            raise ConfigError(f"--model {arguments.model}: no config.json there; name a folder "
                              "written by save_pretrained")  # fmt: skip
        return AutoModelForCausalLM.from_pretrained(arguments.model)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config)


def load_rows(arguments: argparse.Namespace, world_size: int = 1) -> tuple[Tensor, Tensor]:
    """Return the rows of the whole run in training order, and held-out rows: int64 [N, length]."""
    tokens = _tokens(arguments)
    num_rows = len(tokens) // arguments.length
    if num_rows <= HELD_OUT:
        raise ConfigError(
            f"the text has {num_rows} rows of {arguments.length} tokens and {HELD_OUT} are held "
            "out; give a longer --data or a smaller --length"
        )
    rows = tokens[: num_rows * arguments.length].view(num_rows, arguments.length)
    wanted = arguments.steps * arguments.accumulate * arguments.batch * world_size
    generator = torch.Generator().manual_seed(arguments.seed)
    order: list[Tensor] = []
    while sum(map(len, order)) < wanted:
        order.append(torch.randperm(num_rows - HELD_OUT, generator=generator))
    return rows[torch.cat(order)[:wanted]], rows[-HELD_OUT:]


def _tokens(arguments: argparse.Namespace) -> Tensor:
    """Return the text's tokens: by the tokenizer that lies beside the model, else its bytes."""
    files = LIBRARY_SOURCES if arguments.data is None else [arguments.data]
    if not files[0].is_file():
        raise ConfigError(f"--data {files[0]}: no such file; name a text file")
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    if arguments.model is not None and (arguments.model / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    return torch.tensor(list(text.encode()))


def output_folder(arguments: argparse.Namespace, name: str) -> Path:
    """Return the folder to save to."""
    return arguments.output or Path("runs/examples") / name


class SiteCounter:
    """Note, at each forward through a compiled model, how many dropout sites really ran.

    The hook sits on the CompiledModel: a framework that unwraps it, or calls the model inside,
    leaves no trace here.
    """

    def __init__(self, compiled: CompiledModel):
        self.training: list[int] = []
        self.evaluation: list[int] = []
        compiled.register_forward_hook(self._note)

    def _note(self, compiled: CompiledModel, inputs: object, output: object) -> None:
        counts = self.training if compiled.training else self.evaluation
        counts.append(len(compiled.last_executed_sites))


@dataclass
class Outcome:
    """What a run did: loss of each step, held-out losses, and sites executed in each forward."""

    losses: list[float]
    held_out: list[float]
    sites: SiteCounter
    num_sites: int
    folder: Path
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        trained, evaluated = self.sites.training, self.sites.evaluation
        same = "identical" if len(set(self.held_out)) == 1 else "DIFFERENT"
        lines = [
            f"loss {self.losses[0]:.4f} -> {self.losses[-1]:.4f} in {len(self.losses)} steps",
            f"training:   {len(trained)} forwards, {_spread(trained)} of {self.num_sites} residual "
            "sites executed in each",
            f"evaluation: {len(evaluated)} forwards, {_spread(evaluated)} sites executed in each; "
            f"loss twice: {', '.join(f'{x:.4f}' for x in self.held_out)} ({same})",
        ]
        return "\n".join([*lines, *self.notes])


def _spread(counts: Sequence[int]) -> str:
    return " to ".join(str(n) for n in sorted({min(counts), max(counts)})) if counts else "no"


def check_saved(saved: PreTrainedModel, loaded: PreTrainedModel, folder: Path) -> str:
    """Compare a model with what its folder loads as, bit for bit, and say so in one line."""
    ours, theirs = saved.state_dict(), loaded.state_dict()
    different = sorted(ours.keys() ^ theirs.keys()) or [
        name for name in ours if not torch.equal(ours[name].cpu(), theirs[name].cpu())
    ]
    if different:
        raise RuntimeError(f"{folder} loads with other weights: {', '.join(different[:3])}")
    return f"saved to {folder}; transformers loads the same {len(ours)} tensors bit for bit"
