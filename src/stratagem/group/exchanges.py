"""Values that all processes hand in at one place, and that each of them then has of all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from stratagem.group.verdict import Kind, Limits, MemberView, Verdict
from stratagem.messages import explain

__all__ = ["Answer", "Exchanges"]


@dataclasses.dataclass(frozen=True)
class Answer:
    """What to tell some processes.

    Args:
        to: their numbers.
        message: what to tell them.
    """

    to: list[int]
    message: dict[str, Any]


@dataclasses.dataclass
class _Open:
    """An exchange that not all have come to."""

    name: str
    opened_at: float
    limit_s: float | None
    setting: str
    values: dict[int, Any] = dataclasses.field(default_factory=dict[int, Any])


class Exchanges:
    """The exchanges that are open.

    Each belongs to a stream, of which every process takes part in the same order; its name tells
    whether they do. A stream is forgotten when all have left it.

    Args:
        labels: the names of the processes.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = labels
        self._open: dict[tuple[str, int], _Open] = {}
        self._left: dict[str, set[int]] = {}

    def add(self, process_id: int, message: dict[str, Any], now: float) -> Answer | Verdict | None:
        """Takes the value of one process.

        Args:
            process_id: whose it is.
            message: with the stream, the number in it, the name, the value, the limit in seconds
                (None for none but the group's own) and the setting that changes it.
            now: the time in seconds.

        Returns:
            What to tell, where it was the last value or one that waits in vain; a Verdict, where
            it does not belong there; else None.
        """
        key = (message["stream"], message["number"])
        if message["stream"] in self._left:
            return self._abandoned(key, [process_id])
        exchange = self._open.get(key)
        if exchange is None:
            exchange = _Open(message["name"], now, message["limit_s"], message["setting"])
            self._open[key] = exchange
        if exchange.name != message["name"]:
            return self._out_of_step(process_id, message["name"], exchange)
        exchange.values[process_id] = message["value"]
        if len(exchange.values) < len(self._labels):
            return None
        del self._open[key]
        everybody = list(range(len(self._labels)))
        values = [exchange.values[index] for index in everybody]
        return Answer(
            everybody,
            {"kind": "exchanged", "stream": key[0], "number": key[1], "values": values},
        )

    def leave(self, process_id: int, stream: str) -> list[Answer]:
        """Takes note that a process takes no part in a stream any more.

        Every batch that its program has had is complete. So nobody whose program takes as many
        misses one, and who is ahead of its program may have come for more than that.

        Args:
            process_id: who leaves.
            stream: of which everything that is open is dropped.

        Returns:
            What to tell those who wait there.
        """
        left = self._left.setdefault(stream, set())
        left.add(process_id)
        answers: list[Answer] = []
        for key in [key for key in self._open if key[0] == stream]:
            waiting = self._open.pop(key).values.keys() - left
            answers.append(self._abandoned(key, sorted(waiting)))
        if len(left) == len(self._labels):
            del self._left[stream]
        return answers

    def _abandoned(self, key: tuple[str, int], to: list[int]) -> Answer:
        by = [self._labels[index] for index in sorted(self._left[key[0]])]
        return Answer(to, {"kind": "abandoned", "stream": key[0], "number": key[1], "by": by})

    def _out_of_step(self, process_id: int, name: str, exchange: _Open) -> Verdict:
        first = self._labels[next(iter(exchange.values))]
        return Verdict(
            "RuntimeError",
            explain(
                f"{self._labels[process_id]} came to {name!r} where {first} came to "
                f"{exchange.name!r}.",
                expected="the same calls in the same order on every process.",
                fix="see where their programs part: a condition on the process, a loop of another "
                "length, a call that only the chief makes.",
            ),
        )

    def overdue(self, views: Sequence[MemberView], limits: Limits, now: float) -> Verdict | None:
        """Tells whether somebody has waited too long for the others.

        Args:
            views: what is known of the processes.
            limits: of the group.
            now: the time in seconds.

        Returns:
            What is wrong; None if nothing is.
        """
        for exchange in self._open.values():
            waited_s = now - exchange.opened_at
            missing = [i for i in range(len(self._labels)) if i not in exchange.values]
            if exchange.limit_s is None:  # of input: others may be ahead without any harm
                waits = [
                    views[i].place.kind is Kind.INPUT and views[i].unmoved_s > limits.stuck_s
                    for i in exchange.values
                ]
                busy = [views[i].place.kind in (Kind.INPUT, Kind.PYTHON) for i in missing]
                if any(waits) and any(busy):
                    return self._late(exchange, missing, views, waited_s, limits.stuck_s)
            elif 0 < exchange.limit_s < waited_s:
                return self._late(exchange, missing, views, waited_s, exchange.limit_s)
        return None

    def _late(
        self,
        exchange: _Open,
        missing: list[int],
        views: Sequence[MemberView],
        waited_s: float,
        limit_s: float,
    ) -> Verdict:
        names = ", ".join(f"{views[i].label} ({views[i].place})" for i in missing)
        arrived = ", ".join(views[i].label for i in exchange.values)
        return Verdict(
            "DeadlineExceededError",
            explain(
                f"{arrived} waited {waited_s:.0f} s at {exchange.name!r} for {names}.",
                expected=f"all processes there within {limit_s:g} s ({exchange.setting}).",
                fix="see what the missing one does, or set the limit higher if it may take so "
                "long.",
            ),
        )
