"""The study in docs/drift-study.md: which settings move the numbers of a model trained here.

    python bench/drift_study.py                                  trains `make train`'s model first
    python bench/drift_study.py --run runs/small --python OTHER_VENV

Runs three things in child processes: `ops` (each op alone), `bisect` (which setting, which op, how
far) and the margins of 200 prompts x 100 tokens under two instruction sets. Records stay in --work:
a second call makes only what is missing. Writes docs/drift-study.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from bench.drift.records import Machines, Margins, gather, name_of, ratio_text  # noqa: E402
from bench.harness import git_commit  # noqa: E402
from bench.report import render  # noqa: E402
from xtrain.drift.bisect import run_child  # noqa: E402
from xtrain.drift.comparison.drift_report import size_text  # noqa: E402
from xtrain.drift.comparison.flip import ENDS  # noqa: E402
from xtrain.drift.recording.record_format import Record  # noqa: E402

PIECE = 25  # prompts of one record of the margins: a few minutes of one core
FEW, FEW_TOKENS = 8, 24
LEVELS = ("default", "avx2")
SHORT = "hello"  # a prompt of few rows


def main() -> int:
    """Make what is missing and write the page."""
    args = build_parser().parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    run = args.run or train(args.work)
    prompts = write_prompts(args.work, args.prompts)
    ops = measure_ops(args.work, args.python)
    bisects = measure_settings(args.work, run, prompts[0], args.python)
    margins = measure_margins(args.work, run, prompts, args.tokens)
    environment = Record(args.work / f"{LEVELS[0]}_000.drift").environment
    text = page(ops, bisects, margins, environment, args)
    for path, name in zip(args.python, names_of(bisects["versions"]), strict=True):
        text = text.replace(f"python={path}", name).replace(path, name)
    text = text.replace(sys.executable, f"torch {environment['torch.version']}")
    args.out.write_text(text, encoding="utf-8")
    print(f"wrote {args.out}")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--run", help="a trained run with the byte tokenizer; default: train one")
    add("--python", nargs="*", default=[], metavar="VENV", help="environments with another torch")
    add("--gpu", nargs="*", default=[], type=Path, help="records as bench/drift/records.py says")
    add("--prompts", type=int, default=200)
    add("--tokens", type=int, default=100)
    add("--commit", help="what to name as measured; default: this tree's")
    add("--work", type=Path, default=Path("runs/drift-study"), help="folder of the records")
    add("--out", type=Path, default=ROOT / "docs" / "drift-study.md")
    return parser


def train(work: Path) -> str:
    """Train what `make train` trains; return the run's folder."""
    run = work / "small"
    if not (run / "checkpoints").is_dir():
        command = [sys.executable, "-m", "xtrain.train", "--compile", "--dropout", "0.1"]
        flags = ["--preset", "small", "--name", run.name, "--set", f"run.folder={work}"]
        subprocess.run([*command, *flags], check=True, cwd=ROOT)
    return str(run)


def write_prompts(work: Path, count: int) -> list[Path]:
    """Write starts of lines of argparse.py, PIECE a file; the corpus is Python's own source.

    Evenly spaced over the file; where a start is spaces alone, another line's takes its place, in
    files of their own at the end.
    """
    source = Path(argparse.__file__).read_text(encoding="utf-8")
    starts = [line[:16].rstrip() for line in source.splitlines() if len(line.strip()) >= 16]
    places = np.linspace(0, len(starts) - 1, count).astype(int).tolist()
    pieces = [
        [starts[i] for i in places[at : at + PIECE] if starts[i]] for at in range(0, count, PIECE)
    ]
    others = [text for i, text in enumerate(starts) if text and i not in places]
    missing = count - sum(map(len, pieces))
    fill = [others[i] for i in np.linspace(0, len(others) - 1, missing).astype(int).tolist()]
    pieces += [fill[at : at + PIECE] for at in range(0, missing, PIECE)]
    paths = []
    for number, piece in enumerate(pieces):
        path = work / f"prompts_{number:03d}.txt"
        path.write_text("\n".join(piece) + "\n", encoding="utf-8")
        paths.append(path)
    return paths


def child(out: Path, arguments: list[str]) -> dict | list:
    """Return the JSON of a drift command, kept in a file."""
    if not out.exists():
        print(f"{out.name}: {' '.join(arguments)}", flush=True)
        done = run_child([*arguments, "--json", str(out)], {})
        if not out.exists():
            raise SystemExit(f"failed: {done.error}")
    return json.loads(out.read_text(encoding="utf-8"))


def measure_ops(work: Path, pythons: list[str]) -> dict[str, list]:
    """Return what moves which op, by the setting's name."""
    factors = {
        "ATEN_CPU_CAPABILITY": ",".join(LEVELS),
        "MKL_CBWR": "COMPATIBLE,AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2,AVX512_CORE_BF16",
        "threads": "1,2",
    }
    settings = [f"{name}={values}" for name, values in factors.items()]
    settings += [f"python={sys.executable},{path}" for path in pythons]
    found = {}
    for number, setting in enumerate(settings):
        arguments = ["ops", f"--factor={setting}"]
        if setting.startswith("ONEDNN"):
            arguments.append("--dtype=bf16")  # fp32 products are MKL's
        found[setting] = list(child(work / f"ops_{number}.json", arguments))
    return found


def names_of(versions: dict | None) -> list[str]:
    """Return the torch of each other environment, in the order that they were given."""
    names: dict[str, str] = {}
    for package in versions["packages"] if versions else ():
        if package["package"] == "torch":
            names[package["python"]] = f"torch {package['to']}"
    return list(names.values())


def measure_settings(work: Path, run: str, prompts: Path, pythons: list[str]) -> dict[str, Any]:
    """Return what each bisect says."""
    few = work / "prompts_few.txt"
    few.write_text("".join(prompts.read_text().splitlines(keepends=True)[:FEW]))
    shared = ["bisect", run, f"--prompts={few}", f"--tokens={FEW_TOKENS}", "--threads=1"]
    levels = f"ATEN_CPU_CAPABILITY={','.join((*LEVELS, 'avx512'))}"
    factors = {
        "settings": ["threads=1,2", levels, "batch=1,8"],
        "selectors": ["MKL_CBWR=unset,COMPATIBLE,AVX2"],
        "compiled": ["mode=eager,aot_eager,inductor"],
    }
    if pythons:
        factors["versions"] = [f"python={','.join([sys.executable, *pythons])}"]
    found: dict[str, Any] = {"versions": None}
    for name, texts in factors.items():
        arguments = [*shared, *(f"--factor={text}" for text in texts)]
        if name == "versions":
            arguments.append("--packages")
        found[name] = child(work / f"bisect_{name}.json", arguments)
    (short := work / "prompt_short.txt").write_text(f"{SHORT}\n")
    arguments = ["bisect", "small", f"--prompts={short}", "--factor=threads=1,2"]
    found["short"] = child(work / "bisect_short.json", arguments)
    return found


def measure_margins(work: Path, run: str, prompts: list[Path], num_tokens: int) -> Margins:
    """Record every piece under both levels and gather their comparisons."""
    found = Margins()
    for number, path in enumerate(prompts):
        for level in LEVELS:
            out = work / f"{level}_{number:03d}.drift"
            if not out.exists():
                print(out.name, flush=True)
                flags = [f"--prompts={path}", f"--tokens={num_tokens}", f"--batch={PIECE}"]
                # ops of the first step name the culprit; margins need logits alone
                flags += ["--op-steps=1", "--threads=1", f"--out={out}"]
                done = run_child(["record", run, *flags], {"ATEN_CPU_CAPABILITY": level})
                if done.error:
                    raise SystemExit(f"failed: {done.error}")
        gather(found, *(work / f"{level}_{number:03d}.drift" for level in LEVELS))
    return found


# --- The page ------------------------------------------------------------------------------------


def page(ops, bisects, margins: Margins, environment: dict, args) -> str:
    """Return the study as Markdown: what bench/drift/study.md.jinja makes of the results."""
    pieces = sorted(args.work.glob(f"{LEVELS[0]}_*.drift"))
    return render(
        ROOT / "bench/drift/study.md.jinja",
        ops=ops,
        bisects=bisects,
        margins=margins,
        environment=environment,
        args=args,
        commit=args.commit or git_commit(),
        machines=Machines.of(args.work, args.gpu, pieces) if args.gpu else None,
        ratio=ratio_text,
        name_of=name_of,
        size_of=size_text,
        median=np.median,
        FEW=FEW,
        FEW_TOKENS=FEW_TOKENS,
        SHORT=SHORT,
        ENDS=ENDS,
    )


if __name__ == "__main__":
    sys.exit(main())
