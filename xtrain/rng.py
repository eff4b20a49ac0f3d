"""Where every random decision of xtrain comes from: (base seed, step, layer, site) -> site seed.

SplitMix64 (Steele, Lea, Flood 2014: "Fast splittable pseudorandom number generators") is folded
over the four values: s = mix(base_seed), then s = mix(s ^ value) for step, layer and site. `mix` is
a bijection of the 64-bit integers, so two tuples that differ in one place never share a seed, and
tuples that differ in several collide only as often as random 64-bit numbers do. A plain XOR or sum
of the values would collide at once: (step 0, layer 1) with (step 1, layer 0).

Nothing else in xtrain derives randomness, and nothing here holds state.
"""

from __future__ import annotations

from functools import cache
from operator import index
from typing import Any

MASK64 = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: SplitMix64's increment
MUL1 = 0xBF58476D1CE4E5B9
MUL2 = 0x94D049BB133111EB
SEED_RANGE = -(1 << 63), (1 << 64) - 1  # of a run's base seed: what torch's generators take

# Constants of the named sites. Names hash far outside the small integers, so that
# site_seed(..., site="attention") and site_seed(..., site=0) are different sites.
ATTENTION = "attention"
CROSS_ATTENTION = "cross_attention"
FEED_FORWARD = "feed_forward"


def splitmix64(x: Any) -> Any:
    """Return the SplitMix64 output for state x: increment, two xor-shift multiplies, xor-shift.

    Args:     x: any int, taken mod 2^64; or a NumPy array of uint64, of whose every element it is.
    Returns:  int in [0, 2^64), or such an array.
    Source:   Steele, Lea, Flood 2014.
    """
    z = (x + GAMMA) & MASK64
    z = ((z ^ (z >> 30)) * MUL1) & MASK64
    z = ((z ^ (z >> 27)) * MUL2) & MASK64
    return z ^ (z >> 31)


def to_signed(x: int) -> int:
    """Return x mod 2^64 as a signed 64-bit int, the form an int64 tensor holds."""
    x &= MASK64
    return x - (1 << 64) if x >> 63 else x


@cache
def _site_constant(site: str) -> int:
    """Fold the UTF-8 bytes of a site's name, its length first, into 64 bits."""
    data = site.encode()
    state = splitmix64(len(data))
    for start in range(0, len(data), 8):
        state = splitmix64(state ^ int.from_bytes(data[start : start + 8], "little"))
    return state


def site_seed(base_seed: int, step: int, layer: int, site: str | int) -> int:
    """Return the seed of one dropout site at one step.

    Args:     base_seed: the run's seed, any int, taken mod 2^64.
              step: training forward, any int, taken mod 2^64.
              layer: ordinal of the block in the model.
              site: the site's name within its block ("attention", "feed_forward", ...) or an int.
    Returns:  signed 64-bit int, what `xtrain.ops.dropout` takes as seed.
    Raises:   TypeError if a value is neither an int nor, for site, a str.
    """
    if isinstance(site, str):
        site_value = _site_constant(site)
    else:
        site_value = checked_int("site", site)
    state = splitmix64(checked_int("base_seed", base_seed))
    state = splitmix64(state ^ (checked_int("step", step) & MASK64))
    state = splitmix64(state ^ (checked_int("layer", layer) & MASK64))
    return to_signed(splitmix64(state ^ (site_value & MASK64)))


def checked_int(name: str, value: object) -> int:
    """Return value as an int, or raise a TypeError that names the argument; bool is refused."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got the bool {value}")
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an int, got {value!r}") from None
