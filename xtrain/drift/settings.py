"""How a model is recorded, declared once: flags of record and bisect, checks, a record's "run".

A setting is a field of Run, or of Source where a record does not keep it. What a field says of
itself beside its range (see xtrain.settings):

    factor      bisect may be given several values of it
    moves       False: no number depends on it, and compare does not name it
    layout      it decides which prompts are computed together, and with which padding
    only_with   (flag, values): under other values of that flag it does nothing, and is refused
    of_tokens   the same where no token is chosen;  of_drawn: where no prompt is drawn
    later       records of this version from before it lack it; they were made with its default

No torch and no NumPy here: what no model could make right is refused before either is imported.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from xtrain.settings import Flag, Settings, flags, option

BAD_INPUT = 5  # an exit code that is no verdict


class DriftError(ValueError):
    """A record, a model, a flag or a file that cannot be used: exit code 5.

    The message is one line that says what to do.
    """


def missing_package(error: ModuleNotFoundError) -> str:
    """Return what to do about an import that failed. Raises: the error, for a module of ours."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "xtrain"):
        raise error
    return f"this needs the package {package}; install it"


UNSEEN = ("inductor", "unobserved")  # the modes in which no op's result is seen
MODES = ("eager", "aot_eager", *UNSEEN)
DECODERS = ("greedy", "generate", "sample")
DTYPES = ("fp32", "bf16", "fp16")
DEVICE = (r"cpu|cuda(:\d+)?", "cpu, cuda or cuda:N")
MAX_THREADS = 1024  # torch ends the process where the system refuses it a thread
WITH_OPS = {"only_with": ("mode", MODES[:2])}
SAMPLED = {"only_with": ("decode", ("sample",)), "of_tokens": True}


@dataclass(frozen=True, kw_only=True)
class Run(Settings):
    """How a model is run while it is recorded; part of the record."""

    error = DriftError
    mode: str = option(
        "eager",
        "eager, aot_eager or inductor",
        choices=MODES,
        flag={"choices": MODES[:3]},  # the other is for models that are compiled already
        factor=True,
    )
    dtype: str = option(
        "auto", "auto (as saved), fp32, bf16 or fp16", choices=("auto", *DTYPES), factor=True
    )
    device: str = option("cpu", "cpu, cuda or cuda:N", flag={"pattern": DEVICE}, factor=True)
    batch_size: int = option(
        1, "prompts of a forward", at_least=1, flag={"name": "batch"}, factor=True, layout=True
    )
    pad_to: int | None = option(
        None,
        "pad every forward to T tokens; auto: the longest",
        at_least=0,
        flag={"metavar": "T", "words": ("auto",), "shown": "none"},
        factor=True,
        layout=True,
        only_with=("decode", ("greedy", "sample")),  # generate() makes its own inputs
    )
    decode: str | None = option(  # None: one forward, all positions
        "greedy",
        "greedy, generate (the model's own) or sample",
        choices=DECODERS,
        factor=True,
        layout=True,
        of_tokens=True,
    )
    num_tokens: int = option(
        16,
        "chosen per prompt; 0: one forward",
        at_least=1,
        flag={"name": "tokens", "at_least": 0},
        moves=False,
    )
    temperature: float = option(1.0, "of --decode sample", above=0, **SAMPLED)
    sample_seed: int = option(0, "of --decode sample", at_least=0, **SAMPLED)
    top_k: int = option(8, "logits in the readable part", at_least=1, moves=False)
    tensors: bool = option(
        False, "keep whole tensors: exact sizes, large files", moves=False, **WITH_OPS
    )
    op_steps: int | None = option(
        None,
        "steps of a prompt whose ops are recorded",
        at_least=0,
        flag={"shown": "all"},
        moves=False,
        of_tokens=True,
        **WITH_OPS,
    )
    warm_up: int = option(
        0, "forwards before the first recorded one", at_least=0, flag={"default": 1}, moves=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decode == "generate" and (self.mode != "eager" or self.pad_to):
            raise DriftError("decode=generate calls the model by itself: no other mode, no pad_to")
        if self.tensors and self.mode in UNSEEN:
            raise DriftError(
                f"tensors=True keeps the results of ops, and with mode={self.mode} none is seen; "
                "leave it out, or record the plain model with mode=eager or aot_eager"
            )


@dataclass(frozen=True, kw_only=True)
class Source(Settings):
    """Which model and which prompts are recorded, as the command line says it."""

    error = DriftError
    seed: int = option(0, "of a preset's weights and drawn prompts", at_least=0)
    runs: str = option("runs", "where runs lie", flag={"metavar": "DIR"})
    prompts: str | None = option(
        None,
        "a prompt a line, or .json lists of ids",
        flag={"metavar": "FILE", "shown": "built in"},
    )
    num_prompts: int = option(8, "drawn where there is no tokenizer", at_least=1, of_drawn=True)
    prompt_length: int = option(16, "of drawn prompts, in tokens", at_least=1, of_drawn=True)
    threads: int | None = option(
        None,
        "of torch, within an op",
        at_least=1,
        at_most=MAX_THREADS,
        flag={"shown": "torch's own choice"},
        factor=True,
    )


ABOUT = {item.name: item.metadata for item in fields(Run)}
MOVES_NOTHING = {name for name, about in ABOUT.items() if not about.get("moves", True)}
LAYOUT = tuple(name for name, about in ABOUT.items() if about.get("layout"))
DRAWING = tuple(name for name, about in ABOUT.items() if SAMPLED.items() <= about.items())
RUN_FLAGS = flags(Run)
FLAGS = flags(Source) | RUN_FLAGS
FACTORS = tuple(name for name, flag in FLAGS.items() if flag.about.get("factor"))


def fill(args: argparse.Namespace, known: Mapping[str, Flag] = FLAGS) -> argparse.Namespace:
    """Return the flags with the default of each that was not given, all checked.

    Raises: ConfigError for the first one whose value no model could make right.
    """
    for flag in known.values():
        if flag.was_given(args):
            flag.check(getattr(args, flag.dest))
    return argparse.Namespace(**vars(args) | {f.dest: f.value(args) for f in known.values()})


# --- flags that would do nothing: refused, instead of a record that is not what was asked for -----


Factors = Mapping[str, Sequence[str]]  # bisect's: the values of each by its name


def values_of(args: argparse.Namespace, factors: Factors) -> dict[str, Sequence[str]]:
    """Return the values that decode and mode have in the runs: those of a factor, or the flag's."""
    found = {name: factors.get(name, (FLAGS[name].value(args),)) for name in ("decode", "mode")}
    if "compile" in factors:
        found["mode"] = ["inductor" if word == "on" else "eager" for word in factors["compile"]]
    return found


def counts(flag: Flag, values: Mapping[str, Sequence[str]]) -> bool:
    """Return whether a flag does something under some value of the flag that it serves."""
    other, allowed = flag.about.get("only_with", ("", ()))
    return not other or not set(allowed).isdisjoint(values[other])


def check_factors(
    args: argparse.Namespace, factors: Factors, known: Mapping[str, Flag] = FLAGS
) -> None:
    """Raise DriftError for a flag whose every run a factor sets to something else."""
    for name, values in factors.items():
        flag = known.get(name)
        if flag and flag.was_given(args) and str(getattr(args, flag.dest)) not in values:
            raise DriftError(
                f"{flag.shown(args)} is none of the values of the factor {name} "
                f"({', '.join(values)}); leave it out"
            )
        if name == "compile" and "mode" in known and known["mode"].was_given(args):
            raise DriftError(f"--mode {args.mode} is decided by the factor compile; leave it out")


def check_use(args: argparse.Namespace, factors: Factors | None = None) -> None:
    """Raise DriftError for the first flag that no run would notice."""
    check_factors(args, factors or {})
    values = values_of(args, factors or {})
    given = [flag for flag in FLAGS.values() if flag.was_given(args)]
    for flag in given:
        if not counts(flag, values):
            other, allowed = flag.about["only_with"]
            raise DriftError(
                f"{flag.shown(args)} does nothing with --{other} {', '.join(values[other])}; "
                f"leave it out, or use --{other} {' or '.join(allowed)}"
            )
    if args.tensors and args.op_steps == 0:
        raise DriftError("--tensors does nothing with --op-steps 0; leave it out")
    for flag in given if args.tokens == 0 else ():
        if flag.about.get("of_tokens"):
            raise DriftError(f"{flag.shown(args)} does nothing with --tokens 0; leave it out")


def check_use_of_model(args: argparse.Namespace, kind: str, *, tokenizer: bool) -> None:
    """Raise DriftError for a flag that says nothing to this model.

    Args:     kind: preset, run or hugging_face.
              tokenizer: whether the model's is known, so that prompts are the built-in texts.
    """
    drawn = args.prompts is None and not tokenizer
    source = f"--prompts {args.prompts}" if args.prompts is not None else "the built-in texts"
    for flag in () if drawn else FLAGS.values():
        if flag.about.get("of_drawn") and flag.was_given(args):
            raise DriftError(
                f"{flag.shown(args)} is for prompts that are drawn, these are {source}; "
                "leave it out, or name a file of --prompts with as many"
            )
    if FLAGS["seed"].was_given(args) and kind != "preset" and not drawn:
        raise DriftError(
            f"{FLAGS['seed'].shown(args)} draws a preset's weights and prompts, and here nothing "
            "is drawn; leave it out"
        )
    if FLAGS["runs"].was_given(args) and kind != "run":
        advice = f"{args.runs}/{args.model} means the run" if kind == "preset" else "leave it out"
        raise DriftError(
            f"{FLAGS['runs'].shown(args)} does nothing: {args.model} is a "
            f"{'preset, whose name wins' if kind == 'preset' else 'Hugging Face folder'}; {advice}"
        )
