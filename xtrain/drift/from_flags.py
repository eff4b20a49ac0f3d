"""From the flags of record and bisect to a model, prompts and settings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from xtrain.drift import models
from xtrain.drift.errors import DriftError
from xtrain.drift.flag_use import check_use, check_use_of_model, fill
from xtrain.drift.flag_values import check_flags
from xtrain.drift.record_folder import Record
from xtrain.drift.recording import Settings, record_prompts


def record_from_flags(args: argparse.Namespace) -> Record:
    """Load MODEL, decode the prompts, write the record.

    Raises: DriftError for every value that does not fit.
    """
    given = args
    args = fill(args)
    check(args)
    check_use(given)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    settings = Settings(
        mode=args.mode,
        dtype=args.dtype,
        device=args.device,
        batch_size=args.batch,
        pad_to=None,
        decode=args.decode if args.tokens else None,
        num_tokens=args.tokens or 1,
        temperature=args.temperature,
        sample_seed=args.sample_seed,
        top_k=args.top_k,
        tensors=args.tensors,
        op_steps=args.op_steps,
        warm_up=args.warm_up,
    )
    subject = models.load(
        args.model, seed=args.seed, runs=args.runs, dtype=args.dtype, device=args.device
    )
    kind = subject.description["kind"]
    check_use_of_model(given, kind, tokenizer=subject.encode is not None)
    prompts = models.prompts(
        args.prompts,
        subject,
        seed=args.seed,
        length=args.prompt_length,
        count=args.num_prompts,
    )
    settings = replace(settings, pad_to=_pad_to(args, prompts))
    progress = _Progress() if sys.stderr.isatty() else _silent
    return record_prompts(
        subject, prompts, settings, out=Path(args.out), overwrite=args.overwrite, progress=progress
    )


def check(args: argparse.Namespace) -> None:
    """Refuse values that no model could make right, and devices that are not here."""
    check_flags(args)
    kind, _, number = args.device.partition(":")
    count = torch.cuda.device_count() if kind == "cuda" and torch.cuda.is_available() else 0
    if kind == "cuda" and int(number or 0) >= count:
        raise DriftError(
            f"--device is {args.device}, but torch {torch.__version__} finds {count} of them"
        )


def _pad_to(args: argparse.Namespace, prompts: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the tokens of every forward; compiled modes have one shape, and so one compile."""
    if args.pad_to not in (None, "auto"):
        return int(args.pad_to)
    if args.pad_to is None and (args.mode == "eager" or args.decode == "generate"):
        return None
    longest = max(len(prompt["tokens"]) for prompt in prompts)
    return longest + max(args.tokens - 1, 0)


def _silent(text: str) -> None:
    pass


class _Progress:
    def __call__(self, text: str) -> Any:
        sys.stderr.write(f"\r{text}")
        sys.stderr.flush()
