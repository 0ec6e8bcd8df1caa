"""Warning about steps that are compiled again and again."""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
from typing import Any

from stratagem.execution.tracing.function_identity import state_by_name
from stratagem.execution.tracing.program_fingerprint import name_of
from stratagem.logs import warn_on_one_worker
from stratagem.messages import explain

__all__ = ["Recompilations", "Usage"]

_NUM_BEFORE_WARNING = 3
_MAX_PLACES = 1_000


@dataclasses.dataclass
class Usage:
    """Use of one program; outlives the program, which is freed with its function."""

    is_reused: bool = False  # True after its first call


class Recompilations:
    """Counts programs per code location and kinds of arguments."""

    def __init__(self) -> None:
        self._counts: collections.OrderedDict[Any, int] = collections.OrderedDict()
        self._states: dict[Any, dict[str, Any]] = {}
        self._usages: dict[Any, Usage] = {}

    def note(self, fn: object, kinds: object, usage: Usage) -> None:
        """Records a new program; warns if it is the third in a row that was used only once."""
        inner = fn.func if isinstance(fn, functools.partial) else fn
        inner = getattr(inner, "__func__", inner)
        if not isinstance(inner, types.FunctionType):
            return
        place = inner.__code__, hash(kinds)
        last = self._usages.get(place)
        count = 1 if last is None or last.is_reused else self._counts[place] + 1
        self._counts[place] = count
        self._usages[place] = usage
        state = state_by_name(inner)
        before = self._states.get(place, {})
        self._states[place] = state
        while len(self._counts) > _MAX_PLACES:
            oldest, _ = self._counts.popitem(last=False)
            del self._states[oldest], self._usages[oldest]
        if count == _NUM_BEFORE_WARNING:
            changed = [
                name for name in state if state[name] is None or state[name] != before.get(name)
            ]
            warn_on_one_worker(_message(inner, count, changed), RuntimeWarning, stacklevel=2)


def _message(fn: types.FunctionType, count: int, changed: list[str]) -> str:
    what = f"the values of {changed} in it differ" if changed else "its state differs"
    return explain(
        f"{name_of(fn)} ({fn.__code__.co_filename}:{fn.__code__.co_firstlineno}) was compiled "
        f"{count} times for arguments of the same kinds: each call passed a new function, and "
        f"{what}.",
        expected="one function that is compiled once.",
        fix="define it once, outside the loop, and pass the changing values as arguments.",
        code="SG401",
    )
