"""Compares a run on parameter servers with what it promises for its updates.

Clients record each update before they send it and after it was answered (`recording.py`). Updates
are numbered, and each adds 1 to a place of its own, so the final state says how often every update
was made. The promise is that of docs/guides/parameter_servers.md:

- No update is made twice, whatever is killed.
- Without a lost server, every answered update is there.
- A lost server loses the end of what it did, after its last journal entry: nothing that was
  answered before an entry began, and no update that is older than one that it kept.
- With durable updates, no answered update is lost.
- `ClusterCoordinator.updates()` counts what the state has; its losses exceed the missing updates by
  at most those in flight when a server was lost.
- A function's result, and its metric, counts once.

The method is that of Jepsen: concurrent clients, a history, and a checker that knows no timing but
that of the history.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from validation.chaos.recording import read_records

__all__ = ["Attempt", "Cell", "Final", "Finding", "History", "Span", "check", "read_history"]


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One run of an update or a function by a client; `ended_s` is infinite without an answer."""

    client: str
    number: int
    cells: tuple[str, ...]
    begun_s: float
    ended_s: float = math.inf
    outcome: str = "unknown"  # or "ok", "fail"
    function: int | None = None  # that made the update, if its number is another one


@dataclasses.dataclass(frozen=True)
class Span:
    """A time within which something happened: a journal entry, or the loss of a server.

    `is_counted` is False if no process that had seen the server is left to report what it lost.
    """

    begun_s: float
    ended_s: float
    is_counted: bool = True


@dataclasses.dataclass(frozen=True)
class Cell:
    """A variable at the end: how often each update was made, and the server that has its place."""

    kind: str
    counts: Mapping[int, float]
    servers: Mapping[int, int]


@dataclasses.dataclass(frozen=True)
class Final:
    """The end of a run.

    Args:
        cells: variables, by name.
        reported: `ClusterCoordinator.updates()`; None if no coordinator is left to ask.
        metric: a metric to which each function added 1, from `first_function` on, which a restarted
            coordinator began with; None without one.
        register: a variable to which functions assigned their numbers; None without one.
        cut_servers: servers whose journal had a damaged end, which they reported.
    """

    cells: Mapping[str, Cell]
    reported: Mapping[str, Mapping[str, int]] | None = None
    metric: float | None = None
    register: float | None = None
    cut_servers: frozenset[int] = frozenset()
    first_function: int = 0


@dataclasses.dataclass(frozen=True)
class Finding:
    """A broken promise."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclasses.dataclass(frozen=True)
class History:
    """All that was recorded. `done` has the client of each result, by number of the function."""

    updates: Sequence[Attempt] = ()
    functions: Sequence[Attempt] = ()
    entries: Sequence[Span] = ()
    crashes: Mapping[int, Sequence[Span]] = dataclasses.field(default_factory=dict[int, list[Span]])
    done: Mapping[int, Sequence[str]] = dataclasses.field(default_factory=dict[int, list[str]])

    def crashes_of(self, server: int) -> Sequence[Span]:
        """Returns the times at which a server was lost."""
        return self.crashes.get(server, ())


def read_history(folder: Path) -> History:
    """Reads the records of a run, without what a worker that was stopped does after its end."""
    spans: dict[tuple[str, int], tuple[str, Attempt]] = {}
    crashes: dict[int, list[Span]] = defaultdict(list)
    done: dict[int, list[str]] = defaultdict(list)
    end_s = math.inf
    for client, fields in read_records(folder):
        event, at_s = fields["event"], fields["at_s"]
        if event == "invoke":
            cells = tuple(fields.get("cells", ()))
            attempt = Attempt(
                client, fields.get("number", 0), cells, at_s, function=fields.get("function")
            )
            spans[client, fields["span"]] = fields["what"], attempt
        elif event in ("ok", "fail"):
            what, attempt = spans[client, fields["span"]]
            ended = dataclasses.replace(attempt, ended_s=at_s, outcome=event)
            spans[client, fields["span"]] = what, ended
        elif event == "lost":
            crash = Span(fields["begun_s"], at_s, is_counted=fields["is_counted"])
            crashes[fields["server"]].append(crash)
        elif event == "done":
            done[fields["number"]].append(fields["client"])
        elif event == "end":
            end_s = at_s
    by_what: dict[str, list[Attempt]] = defaultdict(list)
    for what, attempt in spans.values():
        if attempt.begun_s < end_s:
            by_what[what].append(attempt)
    entries = [Span(one.begun_s, one.ended_s) for one in by_what["entry"] if one.outcome == "ok"]
    return History(by_what["update"], by_what["function"], entries, crashes, done)


def check(history: History, final: Final, *, is_durable: bool) -> list[Finding]:
    """Returns the broken promises of a run."""
    return list(_Check(history, final, is_durable=is_durable).findings())


class _Check:
    def __init__(self, history: History, final: Final, *, is_durable: bool) -> None:
        self._history = history
        self._final = final
        self._is_durable = is_durable
        self._attempts: dict[tuple[str, int], list[Attempt]] = defaultdict(list)
        for attempt in history.updates:
            for cell in attempt.cells:
                self._attempts[cell, attempt.number].append(attempt)
        self._missing: list[tuple[str, int]] = []  # answered, but not in the state

    def findings(self) -> Iterator[Finding]:
        """Yields the broken promises."""
        yield from self._wrong_counts()
        yield from self._wrong_losses()
        yield from self._wrong_ends()
        yield from self._wrong_register()
        yield from self._wrong_functions()
        if self._final.reported is not None:
            for kind in {cell.kind for cell in self._final.cells.values()}:
                yield from self._wrong_report(kind, self._final.reported[kind])

    def _wrong_counts(self) -> Iterator[Finding]:
        """Compares each place of the state with the attempts to change it."""
        for name, cell in self._final.cells.items():
            unsent = {number for key, number in self._attempts if key == name} - set(cell.counts)
            if unsent:
                yield Finding("incomplete", f"the state of {name} has no place for {unsent}")
            for number, count in cell.counts.items():
                attempts = self._attempts.get((name, number), [])
                what = f"update {number} of {name}"
                if count not in (0, 1):
                    yield Finding("doubled", f"{what} was made {count:g} times")
                elif count and all(one.outcome == "fail" for one in attempts):
                    yield Finding("unsent", f"{what} was made, but never sent or was refused")
                elif not count and any(one.outcome == "ok" for one in attempts):
                    self._missing.append((name, number))

    def _wrong_losses(self) -> Iterator[Finding]:
        for name, number in self._missing:
            if not self._losing_crashes(name, number):
                entry = "" if self._is_durable else ", or is older than a journal entry"
                text = (
                    f"update {number} of {name} was answered and is gone; its server was not lost"
                )
                yield Finding("lost", f"{text}{entry}")

    def _losing_crashes(self, name: str, number: int) -> list[Span]:
        """Returns the losses of a server that may have lost an answered update."""
        server = self._final.cells[name].servers[number]
        attempts = self._attempts[name, number]
        begun_s = min(one.begun_s for one in attempts)
        answered_s = min(one.ended_s for one in attempts if one.outcome == "ok")
        crashes = [one for one in self._history.crashes_of(server) if one.ended_s >= begun_s]
        if server in self._final.cut_servers:
            return crashes
        if self._is_durable:
            return []
        return [
            crash
            for crash in crashes
            if not any(
                entry.begun_s > answered_s and entry.ended_s < crash.begun_s
                for entry in self._history.entries
            )
        ]

    def _wrong_ends(self) -> Iterator[Finding]:
        """Finds updates that a server lost although it kept later ones."""
        kept: dict[int, list[tuple[Attempt, str]]] = defaultdict(list)
        for name, cell in self._final.cells.items():
            for number, count in cell.counts.items():
                attempts = self._attempts.get((name, number), [])
                # An update with several attempts may be of one after the loss.
                if count == 1 and [one.outcome for one in attempts] == ["ok"]:
                    kept[cell.servers[number]].append((attempts[0], name))
        for name, number in self._missing:
            server = self._final.cells[name].servers[number]
            lost_s = min((one.begun_s for one in self._losing_crashes(name, number)), default=None)
            if lost_s is None:
                continue
            oks = [one for one in self._attempts[name, number] if one.outcome == "ok"]
            answered_s = min(one.ended_s for one in oks)
            for later, its_name in kept[server]:
                if later.begun_s > answered_s and later.ended_s < lost_s:
                    yield Finding(
                        "gap",
                        f"server {server} lost update {number} of {name}, and kept the later "
                        f"update {later.number} of {its_name}",
                    )
                    break

    def _wrong_register(self) -> Iterator[Finding]:
        """Checks that the register has the last value assigned to it, or one of the last."""
        value = self._final.register
        if value is None:
            return
        writes = [one for one in self._history.updates if "register" in one.cells]
        own = [one for one in writes if one.number == value and one.outcome != "fail"]
        if not own:
            if value or any(one.outcome == "ok" for one in writes if not self._can_be_lost(one)):
                yield Finding("register", f"it has {value:g}, which no function assigned last")
            return
        last_s = max(one.ended_s for one in own)
        for later in writes:
            is_later = later.outcome == "ok" and later.begun_s > last_s
            if is_later and not self._can_be_lost(later):
                yield Finding(
                    "register", f"it has {value:g}, but {later.number} was assigned after it"
                )
                return

    def _can_be_lost(self, attempt: Attempt) -> bool:
        """Returns True if some server was lost that may have taken a write to the register."""
        if self._is_durable and not self._final.cut_servers:
            return False
        crashes = [one for some in self._history.crashes.values() for one in some]
        return any(one.ended_s >= attempt.begun_s for one in crashes)

    def _wrong_functions(self) -> Iterator[Finding]:
        """Checks that each result came once, and after all updates of its function."""
        answered: dict[int, set[str]] = defaultdict(set)
        sent: dict[int, set[str]] = defaultdict(set)
        for one in self._history.updates:
            function = one.number if one.function is None else one.function
            sent[function].update(one.cells)
            if one.outcome == "ok":
                answered[function].update(one.cells)
        for number, clients in self._history.done.items():
            if len(clients) != 1:
                yield Finding("result", f"function {number} has {len(clients)} results")
            if unfinished := sent[number] - answered[number]:
                names = ", ".join(sorted(unfinished))
                yield Finding("result", f"function {number} ended before its update of {names}")
        first, metric = self._final.first_function, self._final.metric
        num_done = sum(number >= first for number in self._history.done)
        if metric is not None and metric != num_done:
            yield Finding("metric", f"{num_done} functions ended, the metric counted {metric:g}")

    def _wrong_report(self, kind: str, reported: Mapping[str, int]) -> Iterator[Finding]:
        """Compares the reported numbers of one kind of update."""
        cells = {name: one for name, one in self._final.cells.items() if one.kind == kind}
        made = sum(sum(cell.counts.values()) for cell in cells.values())
        if reported["applied"] != made:
            text = f"{reported['applied']} applied {kind} are reported, the state has {made:g}"
            yield Finding("report", text)
        missing = [one for one in self._missing if one[0] in cells]
        unseen = sum(not self._is_reported(*one) for one in missing)
        most = len(missing) + self._num_in_flight(cells)
        if not len(missing) - unseen <= reported["lost"] <= most:
            yield Finding(
                "report",
                f"{reported['lost']} lost {kind} are reported; {len(missing)} are missing, "
                f"{unseen} of which nobody saw, and at most {most} were lost",
            )
        least, most = self._repeats(cells)
        if not least <= reported["repeated"] <= most:
            text = f"{reported['repeated']} repeated {kind} are reported"
            yield Finding("report", f"{text}; the history has {least} to {most}")

    def _is_reported(self, name: str, number: int) -> bool:
        """Returns True if a client that saw this update lived to report its loss.

        It reports with the result of a function that it began after the loss.
        """
        (first, *_) = self._losing_crashes(name, number) or [None]
        if first is None or not first.is_counted:
            return False
        saw = {one.client for one in self._attempts[name, number] if one.outcome == "ok"}
        return any(
            one.client in saw
            and one.begun_s > first.ended_s
            and one.client in self._history.done.get(one.number, ())
            for one in self._history.functions
        )

    def _num_in_flight(self, cells: Mapping[str, Cell]) -> int:
        """Returns the number of updates that a lost server may have made, and that were not lost.

        They were not answered, or were made again later.
        """
        count = 0
        for name, cell in cells.items():
            for number, server in cell.servers.items():
                attempts = self._attempts.get((name, number), [])
                for crash in self._history.crashes_of(server):
                    before = [one for one in attempts if one.begun_s <= crash.ended_s]
                    after = [one for one in attempts if one.ended_s >= crash.begun_s]
                    count += bool(before and after)
        return count

    def _repeats(self, cells: Mapping[str, Cell]) -> tuple[int, int]:
        """Returns the least and the largest number of updates that were made by an earlier run."""
        least = most = 0
        for name, cell in cells.items():
            for number, server in cell.servers.items():
                attempts = sorted(
                    self._attempts.get((name, number), []), key=lambda one: one.begun_s
                )
                most += max(0, len(attempts) - 1)
                is_kept = self._is_durable and server not in self._final.cut_servers
                if is_kept or not self._history.crashes_of(server):
                    least += sum(
                        any(early.ended_s < late.begun_s for early in _answered(attempts[:index]))
                        for index, late in enumerate(attempts)
                        if late.outcome == "ok"
                    )
        return least, most


def _answered(attempts: Sequence[Attempt]) -> list[Attempt]:
    return [one for one in attempts if one.outcome == "ok"]
