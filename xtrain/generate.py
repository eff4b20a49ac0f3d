"""Sample text from a model: `python -m xtrain.generate --run runs/NAME --prompt "def "`.

Every sampled token is a function of the weights, the prompt and the seed: the draw uses a generator
of its own, on the CPU, and neither reads nor moves torch's default one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from xtrain.config import ConfigError, RunConfig
from xtrain.files import shown
from xtrain.rng import SEED_RANGE
from xtrain.settings import Settings, flags, option

if TYPE_CHECKING:
    from torch import Tensor, nn

    from xtrain.data import Tokenizer
    from xtrain.training.run_folder import RunFolder


def generate(
    model: nn.Module,
    prompt: Sequence[int],
    *,
    num_tokens: int,
    vocab_size: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    eos_id: int | None = None,
) -> list[int]:
    """Return the ids that follow prompt, num_tokens of them or fewer if eos_id comes first.

    Args:     model: called as model(tokens [1, T]) -> (logits [1, T, V], _); config.max_seq_len is
              the context, of which the last tokens are kept.
              vocab_size: the tokenizer's; rows of the head beyond it, there to round V up, are
              never chosen.
              temperature: divides the logits; 0 takes the likeliest token.
              top_k: candidates per token; 0: all.
    Raises:   ValueError for an empty prompt or an id outside the vocabulary; FloatingPointError for
              logits of which the largest is not finite: nothing can be drawn from them.
    """
    import torch

    if not prompt or not all(0 <= token < vocab_size for token in prompt):
        raise ValueError(
            f"prompt must be ids below {vocab_size}, at least one, got {shown(prompt, 200)}"
        )
    device = next(model.parameters()).device
    context: int = model.config.max_seq_len  # type: ignore[assignment,union-attr]
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for _ in range(num_tokens):
                inputs = torch.tensor([tokens[-context:]], device=device)
                logits = model(inputs)[0][0, -1, :vocab_size].float().cpu()
                if not logits.max().isfinite():  # -inf only rules a token out
                    raise FloatingPointError(
                        f"the logits after {len(tokens)} tokens are not finite (the largest is "
                        f"{logits.max().item()}): the weights are damaged, or have diverged"
                    )
                tokens.append(_draw(logits, temperature, top_k, generator))
                if tokens[-1] == eos_id:
                    break
    finally:
        model.train(was_training)
    return tokens[len(prompt) :]


def _draw(logits: Tensor, temperature: float, top_k: int, generator) -> int:
    import torch

    if temperature == 0:
        return int(logits.argmax())
    values, ids = logits.topk(min(top_k or len(logits), len(logits)))
    # the largest becomes 0, in double: no quotient overflows, however low the temperature
    scaled = (values - values[0]).double() / temperature
    choice = torch.multinomial(scaled.softmax(-1).float(), 1, generator=generator)
    return int(ids[choice])


def load_run(run: RunFolder, device: str) -> tuple[nn.Module, Tokenizer, int]:
    """Return (model, tokenizer, step) of a run's newest complete checkpoint.

    A warning in the log names each newer one that is damaged.
    Raises: ConfigError when the run has none, or a tokenizer that the model is not for;
            CheckpointError when it does not fit; DataError for the tokenizer.
    """
    from xtrain.checkpoint import CheckpointError, load_model_tensors
    from xtrain.data import load_tokenizer
    from xtrain.model import Config, Transformer
    from xtrain.training.saving import newest_checkpoint

    saved = newest_checkpoint(run, "to sample from")
    tokenizer = load_tokenizer(run.tokenizer)
    tensors = saved.tensors["model"]
    try:
        config = Config.from_dict(saved.state["model"])
    except ValueError as error:
        raise CheckpointError(f"{saved.path} is damaged: model.{error}") from None
    if config.num_parameters() != sum(tensor.numel() for tensor in tensors.values()):
        raise CheckpointError(  # before memory is asked for
            f"{saved.path} is damaged: its weights are not the {config.num_parameters():,} numbers "
            "of its model's configuration"
        )
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"{run.tokenizer} has ids up to {tokenizer.vocab_size - 1}, and the model of "
            f"{saved.path} only {config.vocab_size} rows; put the tokenizer there that it "
            "was trained with"
        )
    model = Transformer(config)
    load_model_tensors(model, tensors, saved.state["aliases"])
    return model.to(device).eval(), tokenizer, saved.step


def _encoded(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a prompt; of an empty one a newline's, or the end of a document's.

    Raises: ConfigError for a prompt of which the tokenizer leaves nothing; DataError.
    """
    ids = tokenizer.encode(text or "\n")
    if not ids and not text and tokenizer.eos_id is not None:
        ids = [tokenizer.eos_id]
    if not ids:
        raise ConfigError(
            f"--prompt {shown(text)} has no token that the run's tokenizer knows; give other text"
        )
    return ids


@dataclass(frozen=True, kw_only=True)
class Sampling(Settings):
    """How a continuation is drawn, each field a flag; all but the device go to `generate`."""

    num_tokens: int = option(200, "how many to sample", at_least=0, flag={"name": "tokens"})
    temperature: float = option(0.8, "0: greedy", at_least=0)
    top_k: int = option(50, "candidates per token, 0: all", at_least=0)
    seed: int = option(0, "of the draws", at_least=SEED_RANGE[0], at_most=SEED_RANGE[1])
    device: str = option("auto", "auto, cpu, cuda or cuda:N")


FLAGS = flags(Sampling)


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of `python -m xtrain.generate`."""
    from xtrain.command_line import Parser

    parser = Parser(prog="python -m xtrain.generate", description="Sample text from a trained run.")
    parser.add_argument("--run", default="", metavar="RUN", help="name in runs/ or path of a run")
    parser.add_argument("--prompt", default="", help="start of the text; empty: a newline")
    for flag in FLAGS.values():
        flag.add_to(parser.add_argument)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the prompt and what the model makes of it."""
    from xtrain.command_line import exit_codes, limit_spinning, show

    with exit_codes() as status:
        args = build_parser().parse_args(arguments)
        limit_spinning()
        from xtrain.training.choices import choose_device
        from xtrain.training.run_folder import find

        asked = {flag.field: flag.value(args) for flag in FLAGS.values()}
        for flag in FLAGS.values():
            flag.check(asked[flag.field])
        device, _ = choose_device(asked.pop("device"))
        run = find(Path(RunConfig().run.folder), args.run, "--run")
        model, tokenizer, step = load_run(run, device)
        prompt = _encoded(args.prompt, tokenizer)
        try:
            size, end = tokenizer.vocab_size, tokenizer.eos_id
            ids = generate(model, prompt, vocab_size=size, eos_id=end, **asked)
        except FloatingPointError as error:
            raise ConfigError(f"{run.path}, step {step}: {error}") from None
        # of all ids at once: how one is spelt may depend on those before it
        show(tokenizer.decode(prompt + ids) + "\n")
    return status.code


if __name__ == "__main__":
    sys.exit(main())
