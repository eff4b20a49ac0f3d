"""Fill the compile caches on disk from several processes, so that one process can then time.

Compiling takes most of a run over all ops and uses one core; its results (inductor's graphs,
Triton's binaries) are cached on disk under keys that do not know the process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

TIMEOUT_S = 90  # of all processes together
Task = tuple[str, int]  # an op and the number of one of its cases


def fill_caches(tasks: Sequence[Task], device: str, num_processes: int) -> list[str]:
    """Compile every provider of these cases; return what went wrong, which costs time alone."""
    import torch

    environment = {
        **os.environ,
        "TORCHINDUCTOR_COMPILE_THREADS": "2",  # each process has compile workers of its own
        "OMP_NUM_THREADS": str(torch.get_num_threads()),  # part of the key of CPU code
    }
    shares = [list(tasks[i::num_processes]) for i in range(num_processes)]
    running = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__)), device, json.dumps(share)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for share in shares
        if share
    ]
    problems, end = [], time.monotonic() + TIMEOUT_S
    for process in running:
        try:
            _, errors = process.communicate(timeout=max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            _, errors = process.communicate()
        if process.returncode != 0:
            last = errors.strip().splitlines()[-1:] or ["no message"]
            problems.append(f"exit code {process.returncode}: {last[0][:200]}")
    return problems


def main(arguments: Sequence[str]) -> int:
    """Compile one process's share of the cases."""
    import torch

    from bench.ops.common import EAGER, NotThere, forward_and_backward

    device, tasks = torch.device(arguments[0]), json.loads(arguments[1])
    for op, number in tasks:
        bench = import_module(f"bench.ops.bench_{op}")
        case = bench.CASES[device.type][number]
        torch.manual_seed(0)
        inputs = bench.make_inputs(case, device)
        for name, provider in bench.PROVIDERS.items():
            if name == EAGER:
                continue
            try:
                forward_and_backward(provider.build(case), inputs.clone())
            except NotThere:
                continue
            except Exception as error:  # the run itself meets it again and puts it in the table
                print(f"{op} {name}: {type(error).__name__}: {error}", file=sys.stderr)
        torch._dynamo.reset()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
