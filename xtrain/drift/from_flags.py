"""From the flags of record and bisect to a model, prompts and settings."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from xtrain.config import ConfigError
from xtrain.drift import models
from xtrain.drift.errors import DriftError
from xtrain.drift.record_folder import Record
from xtrain.drift.recording import Settings, record_prompts


def record_from_flags(args: argparse.Namespace) -> Record:
    """Load MODEL, decode the prompts, write the record.

    Raises: DriftError for every value that does not fit.
    """
    check(args)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    settings = Settings(
        mode=args.mode,
        dtype=args.dtype,
        device=args.device,
        batch_size=args.batch,
        pad_to=args.pad_to,
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
    prompts = models.prompts(
        args.prompts,
        subject,
        seed=args.seed,
        length=args.prompt_length,
        count=args.num_prompts,
    )
    progress = _Progress() if sys.stderr.isatty() else _silent
    return record_prompts(
        subject, prompts, settings, out=Path(args.out), overwrite=args.overwrite, progress=progress
    )


def check(args: argparse.Namespace) -> None:
    """Refuse values that no model could make right."""
    minima = {
        "seed": 0,
        "sample_seed": 0,
        "num_prompts": 1,
        "prompt_length": 1,
        "tokens": 0,
        "batch": 1,
        "pad_to": 1,
        "threads": 1,
        "warm_up": 0,
        "op_steps": 0,
        "top_k": 1,
    }
    for name, minimum in minima.items():
        value = getattr(args, name)
        if value is not None and value < minimum:
            flag = name.replace("_", "-")
            raise DriftError(f"--{flag} must be at least {minimum}, got {value}")
    if args.mode not in ("eager", "aot_eager", "inductor"):
        raise DriftError(f"--mode must be eager, aot_eager or inductor, got {args.mode!r}")
    if args.dtype not in ("auto", *models.DTYPES):
        known = ", ".join(("auto", *models.DTYPES))
        raise DriftError(f"--dtype must be one of {known}, got {args.dtype!r}")
    from xtrain.training.build import choose_device

    try:
        args.device, _ = choose_device(args.device)
    except ConfigError as error:
        raise DriftError(str(error).replace("run.device", "--device")) from None


def _silent(text: str) -> None:
    pass


class _Progress:
    def __call__(self, text: str) -> Any:
        sys.stderr.write(f"\r{text}")
        sys.stderr.flush()
