"""Selection of an all-reduce algorithm by array size, from measured times."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from itertools import pairwise

# Smaller gains are within the measurement noise.
_LEAST_GAIN = 0.05
_LEAST_SHARED_BYTES = 2**18


class Algorithm(enum.StrEnum):
    """All-reduce algorithm.

    COMPILER: chosen by the compiler: NCCL on GPUs, Gloo between processes on CPU. RING,
    HIERARCHICAL, TWO_STAGE, TO_ONE_DEVICE: written out in the program; see the modules of these
    names. TWO_STAGE is for links of a high latency.
    SHARED_MEMORY: through memory that the processes of one machine share; not in a loop within a
    step, nor in a function that calls `run`.

    Example:
        >>> [algorithm.value for algorithm in sg.collectives.Algorithm]
        ['compiler', 'ring', 'hierarchical', 'two stages', 'to one device', 'shared memory']

    Source: specific to Stratagem.
    """

    COMPILER = "compiler"
    RING = "ring"
    HIERARCHICAL = "hierarchical"
    TWO_STAGE = "two stages"
    TO_ONE_DEVICE = "to one device"
    SHARED_MEMORY = "shared memory"


@dataclasses.dataclass(frozen=True)
class Choice:
    """A rule that selects an algorithm by size.

    Args:
        default: algorithm for arrays above all limits.
        limits: pairs of a size in bytes and the algorithm for arrays up to it, in ascending order.
        elsewhere: the rule where SHARED_MEMORY cannot be used; None for the compiler's.

    Example:
        >>> ring, compiler = sg.collectives.Algorithm.RING, sg.collectives.Algorithm.COMPILER
        >>> choice = sg.collectives.Choice(default=ring, limits=((1024, compiler),))
        >>> choice.algorithm(1024).value, choice.algorithm(1025).value
        ('compiler', 'ring')

    Source: specific to Stratagem.
    """

    default: Algorithm = Algorithm.COMPILER
    limits: tuple[tuple[int, Algorithm], ...] = ()
    elsewhere: Choice | None = None

    def algorithm(self, size_bytes: int) -> Algorithm:
        """Returns the algorithm for an array.

        Args:
            size_bytes: size of the array on one replica.

        Example:
            >>> from stratagem.devices.collectives.choice import Algorithm, Choice
            >>> Choice(Algorithm.RING, ((1024, Algorithm.COMPILER),)).algorithm(4096).value
            'ring'
        """
        for limit, algorithm in self.limits:
            if size_bytes <= limit:
                return algorithm
        return self.default


BY_COMPILER = Choice()


def choose(times_s: Mapping[Algorithm, Mapping[int, float]]) -> Choice:
    """Derives a rule from measured times, by algorithm and array size in bytes.

    The compiler's algorithm is used unless another is faster by more than the measurement noise.
    Between two measured sizes the limit is where their times would cross, assuming each is a power
    of the size. TO_ONE_DEVICE takes as much memory as all replicas together, so it is never used
    above the largest measured size. SHARED_MEMORY waits for Python's GIL, which other threads may
    hold for longer than a small sum takes.
    """
    if Algorithm.SHARED_MEMORY in times_s:
        others = {one: times for one, times in times_s.items() if one != Algorithm.SHARED_MEMORY}
        return dataclasses.replace(_rule(times_s), elsewhere=choose(others))
    return _rule(times_s)


def _rule(times_s: Mapping[Algorithm, Mapping[int, float]]) -> Choice:
    sizes = sorted(times_s[Algorithm.COMPILER])
    best = [
        _fastest(
            {
                algorithm: times[size]
                for algorithm, times in times_s.items()
                if size >= _LEAST_SHARED_BYTES or algorithm is not Algorithm.SHARED_MEMORY
            }
        )
        for size in sizes
    ]
    limits: list[tuple[int, Algorithm]] = []
    for ends, (below, above) in zip(pairwise(sizes), pairwise(best), strict=True):
        if below is not above:
            limits.append((_crossover_size(ends, times_s[below], times_s[above]), below))
    largest = sizes[-1]
    beyond = _fastest(
        {
            algorithm: times[largest]
            for algorithm, times in times_s.items()
            if algorithm is not Algorithm.TO_ONE_DEVICE
        }
    )
    if beyond is not best[-1]:
        limits.append((largest, best[-1]))
    return Choice(beyond, tuple(limits))


def _fastest(times_s: Mapping[Algorithm, float]) -> Algorithm:
    fastest = min(times_s, key=lambda algorithm: times_s[algorithm])
    gains = times_s[fastest] < (1.0 - _LEAST_GAIN) * times_s[Algorithm.COMPILER]
    return fastest if gains else Algorithm.COMPILER


def _crossover_size(
    ends: tuple[int, int], below_s: Mapping[int, float], above_s: Mapping[int, float]
) -> int:
    """Returns the size at which the algorithm that is best at the lower end loses its lead."""
    lower, upper = ends
    # The compiler's algorithm may be selected at an end where it is not the fastest.
    lead = max(math.log(above_s[lower] / below_s[lower]), 0.0)
    lag = max(math.log(below_s[upper] / above_s[upper]), 0.0)
    share = lead / (lead + lag) if lead + lag else 0.5
    return round(lower * (upper / lower) ** share)
