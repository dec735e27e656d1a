"""Counter-based random numbers, as Philox: a pure function of seed, position and column, without generator state."""

from __future__ import annotations

import secrets
from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt

UintArray = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LOW_BITS = (1 << 64) - 1


def random_bits(seeds: Items[int], positions: Items[int], columns: npt.NDArray[np.int64]) -> UintArray:
    """Returns random 64-bit words from SplitMix64 (Steele, Lea, Flood 2014; it passes BigCrush).

    The key is mixed from seed and position; the column is the counter.

    Args:
        seeds, positions: one of each per row.
        columns: (columns,), the same for all rows, or (rows, columns); not negative.

    Returns:
        (rows, columns).
    """
    with np.errstate(over="ignore"):
        seed = np.array([value & _LOW_BITS for value in seeds], dtype=np.uint64)
        position = np.array(positions, dtype=np.uint64)
        key = _mix(_mix(seed + _GOLDEN) + position * _GOLDEN)
        return _mix(key[:, None] + (columns.astype(np.uint64) + np.uint64(1)) * _GOLDEN)


def _mix(x: UintArray) -> UintArray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def exponential_noise(
    seeds: Items[int], positions: Items[int], columns: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Returns standard exponential variates, never 0. Arguments and shape are those of `random_bits`."""
    uniform = ((random_bits(seeds, positions, columns) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return -np.log(uniform)


def make_seed(engine_seed: int | None, number: int) -> int:
    """Returns the 64-bit seed of the `number`-th request of an engine; unpredictable if the engine has no seed."""
    if engine_seed is None:
        return secrets.randbits(64)
    return int(random_bits([engine_seed], [number], np.zeros(1, np.int64))[0, 0])
