"""Records of the programs that a strategy has compiled, with the reason of each."""

from __future__ import annotations

import collections
import dataclasses
import types
import weakref
from collections.abc import Iterable
from typing import Any

from stratagem.contexts import get_strategy
from stratagem.execution.tracing.program_fingerprint import name_of

_MAX_RECORDS = 1_000


@dataclasses.dataclass(frozen=True)
class Compilation:
    """One compiled program of a function.

    Attributes:
        function: qualified name of the function.
        place: file and line of its definition; "" for a callable without code.
        reason: difference from an earlier call that made this program necessary.

    Example:
        >>> strategy = sg.OneDeviceStrategy("cpu:0")
        >>> strategy.run(jax.numpy.sum, args=(np.ones(3),)).item()
        3.0
        >>> [(one.function, one.reason) for one in sg.explain_recompiles(strategy)]
        [('sum', 'first call')]

    Source: specific to Stratagem.
    """

    function: str
    place: str
    reason: str

    def __str__(self) -> str:
        place = f" ({self.place})" if self.place else ""
        return f"{self.function}{place}: {self.reason}"


class _Records:
    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.latest: collections.deque[Compilation] = collections.deque(maxlen=_MAX_RECORDS)


_records: weakref.WeakKeyDictionary[Any, _Records] = weakref.WeakKeyDictionary()


def note_compilation(strategies: Iterable[object], fn: Any, reason: str) -> None:
    """Records a new program of a function, which uses the given strategies."""
    code = getattr(fn, "__code__", None)
    place = f"{code.co_filename}:{code.co_firstlineno}" if isinstance(code, types.CodeType) else ""
    compilation = Compilation(name_of(fn), place, reason)
    for strategy in strategies:
        records = _records.setdefault(strategy, _Records())
        records.counts[compilation.function] += 1
        records.latest.append(compilation)


def compilations_of(strategy: object) -> dict[str, int]:
    """Returns the number of programs by function name, in the order of the first ones."""
    records = _records.get(strategy)
    return {} if records is None else dict(records.counts)


def explain_recompiles(strategy: object = None) -> list[Compilation]:
    """Returns the programs that a strategy compiled, with the reason of each. Call anywhere.

    A program is compiled at the first call of a function, and again for arguments of other shapes,
    dtypes or static values, or for a new function with other values in it.

    Args:
        strategy: whose programs; None for the current one.

    Returns:
        The last 1,000 programs, in the order of their compilation. Printed, each is a line.

    Example:
        >>> strategy = sg.OneDeviceStrategy("cpu:0")
        >>> for rows in (4, 3):
        ...     _ = strategy.run(jax.numpy.sum, args=(np.ones((rows, 2), np.float32),))
        >>> sg.explain_recompiles(strategy)[-1].reason
        'args[0]: float32[4,2] -> float32[3,2]'

    Source: JAX, jax_explain_cache_misses.
    """
    records = _records.get(get_strategy() if strategy is None else strategy)
    return [] if records is None else list(records.latest)
