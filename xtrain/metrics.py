"""Speed, memory and model FLOPs utilisation of a run; each function states its formula.

torch is imported only where a device is asked, so that importing this module costs nothing.
"""

from __future__ import annotations

import re
import resource
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xtrain.settings import ConfigError

if TYPE_CHECKING:
    import torch

    from xtrain.model import Config

GIB = 2**30

# Dense bf16 FLOP/s with fp32 accumulation, without structured sparsity (many data sheets print the
# sparse figure, twice this), from NVIDIA's data sheets and architecture white papers. A device
# matches when its name holds all words of a row; rows with more words go first. Variants that run
# slower under a similar name are told apart by their words or left out: better none than wrong.
DENSE_BF16_FLOPS: dict[tuple[str, ...], float] = {
    ("GB200",): 2500e12,  # GB200 NVL72: 360e15 sparse for 72
    ("B200",): 2250e12,  # HGX B200: 36e15 sparse for 8
    ("GH200",): 989e12,
    ("H200", "NVL"): 835e12,
    ("H200",): 989e12,
    ("H100", "HBM3"): 989e12,  # SXM5 calls itself "H100 80GB HBM3"
    ("H100", "NVL"): 835e12,
    ("H100", "PCIe"): 756e12,
    ("A100",): 312e12,  # SXM4 and PCIe, 40 and 80 GB
    ("A40",): 149.7e12,
    ("A30",): 165e12,
    ("A10",): 125e12,
    ("L40S",): 362e12,
    ("L40",): 181e12,
    ("L4",): 121e12,
    ("RTX", "A6000"): 154.8e12,
    ("RTX", "5090"): 209.5e12,
    ("RTX", "4090"): 165.2e12,
    ("RTX", "3090"): 71e12,
}
# Words that mark a slower variant or a slice of a device.
_OTHER_VARIANT = {"D", "LAPTOP", "MAX", "MIG", "SUPER", "TI"}


def peak_flops_of(device_name: str) -> float | None:
    """Return the dense bf16 FLOP/s of the device of this name, or None when it is not known."""
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    if words & _OTHER_VARIANT:
        return None
    for row in sorted(DENSE_BF16_FLOPS, key=len, reverse=True):
        if words.issuperset(word.upper() for word in row):
            return DENSE_BF16_FLOPS[row]
    return None


def device_peak_flops(device: torch.device | str) -> float | None:
    """Return the dense bf16 FLOP/s of a CUDA device in the table; None for a CPU or another one."""
    if not _is_cuda(device):
        return None
    import torch

    return peak_flops_of(torch.cuda.get_device_name(device))


def _is_cuda(device: torch.device | str) -> bool:
    return str(device).startswith("cuda")


def flops_per_token(num_parameters: float, n_layers: int, width: int, seq_len: int) -> float:
    """Return the model FLOPs of one token, forward and backward: 6 N + 12 L D T.

    6 N:      each of N weights is multiplied and added once forward, twice backward.
    12 L D T: in each of L layers q k^T and the product with v take 2 * 2 D T FLOPs forward, twice
              that backward; the causal half is not subtracted, as is usual.
    What a run computes besides, such as recomputed activations, is no work of the model's and does
    not count: it lowers utilisation instead of raising it.
    Source: Chowdhery et al. 2022 (PaLM), appendix B.
    """
    return 6.0 * num_parameters + 12.0 * n_layers * width * seq_len


def model_flops_per_token(config: Config, seq_len: int) -> float:
    """Return flops_per_token of our model.

    N is every weight but an untied input embedding, which is looked up and not multiplied;
    D is the width of attention, n_heads * head_dim.
    """
    lookup = 0 if config.tie_embeddings else config.vocab_size * config.dim
    multiplied = config.num_parameters() - lookup
    return flops_per_token(multiplied, config.n_layers, config.n_heads * config.head_dim, seq_len)


def mfu(
    tokens_per_s: float, flops_per_token: float, peak_flops: float | None, num_devices: int = 1
) -> float | None:
    """Return model FLOPs utilisation: (tokens/s / devices) * FLOPs per token / peak FLOP/s.

    Args:     tokens_per_s: of all devices together.
              peak_flops: dense, of one device; None gives None.
    """
    if peak_flops is None:
        return None
    return tokens_per_s / num_devices * flops_per_token / peak_flops


def format_mfu(value: float | None) -> str:
    """Return utilisation in percent for people, or n/a when the device's peak is unknown."""
    return "n/a" if value is None else f"{100 * value:.2f}%"


def peak_memory_gib(device: torch.device | str) -> float:
    """Return the peak memory in GiB (2^30 bytes).

    CUDA: the most that tensors held since the last `reset_peak_memory` (max_memory_allocated; the
    allocator's cache comes on top). CPU: the most that the process was resident since its start.
    """
    if _is_cuda(device):
        import torch

        return torch.cuda.max_memory_allocated(device) / GIB
    return _peak_resident_bytes() / GIB


def _peak_resident_bytes() -> int:
    """VmHWM where there is one: ru_maxrss starts at the size of whoever started the process."""
    try:
        with open("/proc/self/status") as status:
            line = next(line for line in status if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak * (1 if sys.platform == "darwin" else 1024)  # bytes there, KiB elsewhere


def memory_bytes(device: torch.device | str) -> int | None:
    """Return the bytes that a device can hold: a GPU's own, or this machine's with its swap.

    None where the system does not say. A limit of this process's control group counts.
    """
    if _is_cuda(device):
        import torch

        return torch.cuda.get_device_properties(device).total_memory
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        total = sum(int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "SwapTotal"))
    except (OSError, KeyError, ValueError):
        return None
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            return min(total, int(file.read()))
    except (OSError, ValueError):  # another system, or no limit
        return total


def check_fits(num_bytes: int, what: str, device: torch.device | str) -> None:
    """Raise ConfigError, with the bytes that it would take, for what no memory here can hold."""
    available = memory_bytes(device)
    if available is not None and num_bytes > available:
        raise ConfigError(
            f"{what} would take at least {num_bytes:,} bytes ({num_bytes / GIB:,.1f} GiB), and "
            f"{device} has {available:,} ({available / GIB:,.1f} GiB)"
        )


def reset_peak_memory(device: torch.device | str) -> None:
    """Start a new peak on a CUDA device; a process's resident peak cannot be reset."""
    if _is_cuda(device):
        import torch

        torch.cuda.reset_peak_memory_stats(device)


@dataclass(frozen=True)
class Speed:
    """How fast steps ran. mfu is None where the peak of the device is unknown."""

    step_time_ms: float
    tokens_per_s: float  # of all devices
    mfu: float | None

    def to_dict(self) -> dict[str, float | None]:
        """Return the fields under the names that metrics.jsonl uses."""
        percent = None if self.mfu is None else 100 * self.mfu
        return {
            "step_time_ms": self.step_time_ms,
            "tokens_per_s": self.tokens_per_s,
            "mfu_percent": percent,
        }


class SpeedMeter:
    """Turns the time and tokens of each step into Speed, and sums up a run without its first step.

    The first step compiles, fills caches and warms clocks: it is reported on its own and left out
    of `summary`.
    """

    def __init__(
        self, flops_per_token: float, *, peak_flops: float | None = None, num_devices: int = 1
    ) -> None:
        """See `mfu` for the arguments; peak_flops usually comes from `device_peak_flops`."""
        if num_devices < 1:
            raise ValueError(f"num_devices must be at least 1, got {num_devices}")
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops
        self._num_devices = num_devices
        self._steps = 0
        self._time_s = 0.0
        self._tokens = 0
        self.first_step_time_s: float | None = None

    def record(self, step_time_s: float, num_tokens: int) -> Speed:
        """Take in one step and return its speed.

        Args:     step_time_s: wall time from the step's start to its end, the device synchronised.
                  num_tokens: tokens that all devices processed in it.
        """
        if step_time_s <= 0:
            raise ValueError(f"step_time_s must be above 0, got {step_time_s}")
        if self.first_step_time_s is None:
            self.first_step_time_s = step_time_s
        else:
            self._steps += 1
            self._time_s += step_time_s
            self._tokens += num_tokens
        return self._speed(step_time_s, num_tokens, 1)

    def summary(self) -> Speed | None:
        """Return mean step time, total tokens / total time and its MFU; None before step two."""
        if self._steps == 0:
            return None
        return self._speed(self._time_s, self._tokens, self._steps)

    def _speed(self, time_s: float, num_tokens: int, num_steps: int) -> Speed:
        rate = num_tokens / time_s
        utilisation = mfu(rate, self._flops_per_token, self._peak_flops, self._num_devices)
        return Speed(1000 * time_s / num_steps, rate, utilisation)
