"""Exchanges of values between all processes, collected and checked by process 0."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from stratagem.group.verdict import Activity, GroupLimits, MemberView, Verdict, named
from stratagem.messages import explain


@dataclasses.dataclass(frozen=True)
class ExchangeReply:
    """A message to some processes, given by their ids."""

    to: list[int]
    message: dict[str, Any]


@dataclasses.dataclass
class _OpenExchange:
    """An exchange that some processes have not joined yet."""

    name: str
    opened_at: float
    limit_s: float | None
    setting: str
    values: dict[int, Any] = dataclasses.field(default_factory=dict[int, Any])


class Exchanges:
    """All open exchanges.

    Each belongs to a stream, which every process joins in the same order; comparing names verifies
    that. A stream is dropped when all processes have left it.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = labels
        self._open: dict[tuple[str, int], _OpenExchange] = {}
        self._left: dict[str, set[int]] = {}

    def add(
        self, process_id: int, message: dict[str, Any], now: float
    ) -> ExchangeReply | Verdict | None:
        """Adds the value of one process; `now` is in seconds.

        Returns a reply for the last value, or for one that others will not join; a Verdict for a
        value out of order; otherwise None.
        """
        key = (message["stream"], message["number"])
        if message["stream"] in self._left:
            return self._abandoned(key, [process_id])
        exchange = self._open.get(key)
        if exchange is None:
            exchange = _OpenExchange(message["name"], now, message["limit_s"], message["setting"])
            self._open[key] = exchange
        if exchange.name != message["name"]:
            return self._mismatch_verdict(process_id, message["name"], exchange)
        exchange.values[process_id] = message["value"]
        if len(exchange.values) < len(self._labels):
            return None
        del self._open[key]
        all_processes = list(range(len(self._labels)))
        runs = _runs([exchange.values[index] for index in all_processes])
        return ExchangeReply(
            all_processes, {"kind": "exchanged", "stream": key[0], "number": key[1], "runs": runs}
        )

    def leave(self, process_id: int, stream: str) -> list[ExchangeReply]:
        """Removes a process from a stream and returns replies for processes that wait there.

        Processes that read ahead may wait for more batches than the leaving program took; those it
        did take are complete.
        """
        left = self._left.setdefault(stream, set())
        left.add(process_id)
        replies: list[ExchangeReply] = []
        for key in [key for key in self._open if key[0] == stream]:
            waiting = self._open.pop(key).values.keys() - left
            replies.append(self._abandoned(key, sorted(waiting)))
        if len(left) == len(self._labels):
            del self._left[stream]
        return replies

    def _abandoned(self, key: tuple[str, int], to: list[int]) -> ExchangeReply:
        by = [self._labels[index] for index in sorted(self._left[key[0]])]
        return ExchangeReply(
            to, {"kind": "abandoned", "stream": key[0], "number": key[1], "by": by}
        )

    def _mismatch_verdict(self, process_id: int, name: str, exchange: _OpenExchange) -> Verdict:
        first = self._labels[next(iter(exchange.values))]
        return Verdict(
            "RuntimeError",
            explain(
                f"{self._labels[process_id]} called {name!r} while {first} called "
                f"{exchange.name!r}.",
                expected="the same calls in the same order on every process.",
                fix="find where their programs differ: a condition on the process, a loop of "
                "another length, a call that only the chief makes.",
                code="SG507",
            ),
        )

    def overdue(
        self, views: Sequence[MemberView], limits: GroupLimits, now: float
    ) -> Verdict | None:
        """Returns a verdict if a process has waited too long for others, or None."""
        for exchange in self._open.values():
            waited_s = now - exchange.opened_at
            missing = [i for i in range(len(self._labels)) if i not in exchange.values]
            if exchange.limit_s is None:  # input: other processes may read ahead
                waits = [
                    views[i].position.kind is Activity.INPUT and views[i].unmoved_s > limits.stuck_s
                    for i in exchange.values
                ]
                busy = [
                    views[i].position.kind in (Activity.INPUT, Activity.PYTHON) for i in missing
                ]
                if any(waits) and any(busy):
                    return self._timeout_verdict(exchange, missing, views, waited_s, limits.stuck_s)
            elif 0 < exchange.limit_s < waited_s:
                return self._timeout_verdict(exchange, missing, views, waited_s, exchange.limit_s)
        return None

    def _timeout_verdict(
        self,
        exchange: _OpenExchange,
        missing: list[int],
        views: Sequence[MemberView],
        waited_s: float,
        limit_s: float,
    ) -> Verdict:
        names = named([f"{views[i].label} ({views[i].position})" for i in missing])
        arrived = named([views[i].label for i in exchange.values])
        return Verdict(
            "DeadlineExceededError",
            explain(
                f"{arrived} waited {waited_s:.0f} s at {exchange.name!r} for {names}.",
                expected=f"all processes to call it within {limit_s:g} s ({exchange.setting}).",
                fix="check what the missing process does, or raise the limit if it may take "
                "that long.",
                code="SG508",
            ),
        )


def _runs(values: Sequence[Any]) -> list[tuple[Any, int]]:
    """Returns each value with the number of successive processes that sent it.

    Most exchanges are barriers or checks for equality, so that an answer to n processes has few
    values instead of n.
    """
    runs: list[tuple[Any, int]] = []
    for value in values:
        if runs and _is_same(value, runs[-1][0]):
            runs[-1] = (value, runs[-1][1] + 1)
        else:
            runs.append((value, 1))
    return runs


def _is_same(value: Any, other: Any) -> bool:
    """True for equal JSON; in Python, 1, 1.0 and True are equal."""
    if type(value) is not type(other) or value != other:
        return False
    return (
        value is None
        or isinstance(value, bool | int | str)
        or (json.dumps(value, sort_keys=True) == json.dumps(other, sort_keys=True))
    )
