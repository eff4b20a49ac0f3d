"""What recording costs: a forward under `xtrain.drift.record` against a plain one, and the memory.

    python bench/drift_cost.py --preset 124m --length 128

Prints one line: medians of CPU and wall time of both, their ratios, and the peak memory before and
after the first record. The hashes of the weights and the folder on the disk are included.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from xtrain import drift  # noqa: E402
from xtrain.drift.recording.subject import draw_tokens, load  # noqa: E402


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="124m")
    parser.add_argument("--length", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=5, help="of which the median counts")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = load(args.preset, seed=0, runs="runs", dtype="auto", device="cpu").model.eval()
    tokens = torch.from_numpy(draw_tokens(1, args.length, 256, 0))

    @torch.no_grad()
    def plain() -> None:
        model(tokens)

    plain_s = median_times(plain, args.runs)
    plain_mib = peak_memory_mib()
    record_s = median_times(lambda: drift.record(model, tokens), args.runs)
    ratios = [b / a for a, b in zip(plain_s, record_s, strict=True)]
    print(
        f"{args.preset}, T = {args.length}, {args.threads} threads, torch {torch.__version__}: "
        f"CPU {plain_s[0]:.2f} s plain, {record_s[0]:.2f} s recorded, {ratios[0]:.2f} x; "
        f"wall {plain_s[1]:.2f} s, {record_s[1]:.2f} s, {ratios[1]:.2f} x; "
        f"peak memory {plain_mib:.0f} MiB, {peak_memory_mib():.0f} MiB"
    )
    return 0


def median_times(function: Callable[[], object], runs: int) -> tuple[float, float]:
    """Return the medians of (CPU seconds, wall seconds) after a first call that is not counted."""
    function()
    cpu, wall = [], []
    for _ in range(runs):
        start = time.process_time(), time.perf_counter()
        function()
        cpu.append(time.process_time() - start[0])
        wall.append(time.perf_counter() - start[1])
    return statistics.median(cpu), statistics.median(wall)


def peak_memory_mib() -> float:
    """Return the largest resident size of this process so far (ru_maxrss is in KiB on Linux)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())
