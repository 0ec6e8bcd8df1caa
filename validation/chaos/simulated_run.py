"""A simulated run on parameter servers: its history and its end, with a flaw if one is wanted."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections import Counter, defaultdict, deque

from validation.chaos.history import Attempt, Cell, Final, History, Span

__all__ = ["FLAWS", "Simulation"]

_CELLS = ("adds", "rows", "first", "second")
_KINDS = {"adds": "assign_add", "rows": "scatter_add", "first": "push", "second": "push"}
_NUM_SERVERS = 2
# What a flawed server or client does wrong, and what has to be found.
FLAWS = {
    "forgets": "lost",  # an answered update, though no server was lost
    "repeats": "doubled",  # an update of a function that runs again
    "omits from entry": "gap",  # an update from a journal entry
    "skips entry": "lost",  # answers a request for an entry, and writes none
    "answers early": "lost",  # a durable update before it is on disk
    "invents losses": "report",
    "hides losses": "report",
    "counts twice": "metric",  # the metric of a function that ran again
}


@dataclasses.dataclass
class _Server:
    counts: Counter[tuple[str, int]] = dataclasses.field(default_factory=Counter)
    applied: Counter[str] = dataclasses.field(default_factory=Counter)
    makers: dict[tuple[str, int], str] = dataclasses.field(default_factory=dict)
    entry: tuple[Counter[tuple[str, int]], Counter[str]] = (Counter(), Counter())

    def write(self) -> None:
        self.entry = copy.deepcopy((self.counts, self.applied))

    def restart(self) -> None:
        self.counts, self.applied = copy.deepcopy(self.entry)


@dataclasses.dataclass
class _Worker:
    """A worker and what it does: the function's number, the update's place, and if it was made."""

    name: str
    function: int | None = None
    place: int = 0
    is_sent: bool = False
    is_made: bool = False
    begun_s: float = 0.0
    function_begun_s: float = 0.0


class Simulation:
    """Runs `num_functions` functions of four updates each on two workers."""

    def __init__(
        self, seed: int, *, is_durable: bool = False, flaw: str = "", num_functions: int = 20
    ) -> None:
        self._chance = random.Random(seed)
        self._is_durable = is_durable
        self._flaw = flaw
        self.num_flaws = 0
        self._now_s = 0.0
        self._servers = [_Server() for _ in range(_NUM_SERVERS)]
        self._queue = deque(range(num_functions))
        self._num_functions = num_functions
        self._num_workers = 0
        self._workers = [self._new_worker() for _ in range(2)]
        self._updates: list[Attempt] = []
        self._functions: list[Attempt] = []
        self._entries: list[Span] = []
        self._crashes: dict[int, list[Span]] = defaultdict(list)
        self._done: dict[int, list[str]] = {}
        self._seen: dict[int, list[Counter[str]]] = {0: [Counter()], 1: [Counter()]}
        self._lost: Counter[str] = Counter()
        self._repeated: set[tuple[str, int, str]] = set()
        self._metric = 0

    def run(self) -> tuple[History, Final]:
        """Runs to the end."""
        while len(self._done) < self._num_functions:
            self._now_s += 1
            draw = self._chance.random()
            if draw < 0.005:
                self._kill_worker(self._chance.randrange(2))
            elif draw < 0.01:
                self._crash(self._chance.randrange(_NUM_SERVERS))
            elif draw < 0.02:
                self._write_entries()
            elif draw < 0.03:
                self._write_own_entry(self._chance.choice(self._servers))
            else:
                self._advance(self._chance.choice(self._workers))
        counts = {
            name: {
                number: self._servers[_server_of(name, number)].counts[name, number]
                for number in range(self._num_functions)
            }
            for name in _CELLS
        }
        if self._flaw == "forgets":
            self._forget(counts)
        cells = {
            name: Cell(
                _KINDS[name],
                own,
                {number: _server_of(name, number) for number in own},
            )
            for name, own in counts.items()
        }
        if self._flaw == "invents losses":
            self._lost["push"] += 1000
            self.num_flaws += 1
        if self._flaw == "hides losses":
            self.num_flaws += bool(self._lost)
            self._lost.clear()
        reported = {
            kind: {
                "applied": sum(one.applied[kind] for one in self._servers),
                "repeated": sum(_KINDS[cell] == kind for cell, _, _ in self._repeated),
                "lost": self._lost[kind],
            }
            for kind in set(_KINDS.values())
        }
        history = History(self._updates, self._functions, self._entries, self._crashes, self._done)
        return history, Final(cells, reported, metric=self._metric)

    def _new_worker(self) -> _Worker:
        self._num_workers += 1
        return _Worker(f"worker {self._num_workers}")

    def _advance(self, worker: _Worker) -> None:
        """One step of a worker: takes a function, sends an update, has it made, gets the answer."""
        if worker.function is None:
            if self._queue:
                worker.function, worker.place = self._queue.popleft(), 0
                worker.function_begun_s = self._now_s
        elif worker.place == len(_CELLS):
            self._finish(worker)
        elif not worker.is_sent:
            worker.is_sent, worker.is_made, worker.begun_s = True, False, self._now_s
        elif not worker.is_made:
            self._make(worker)
        else:
            self._answer(worker)

    def _make(self, worker: _Worker) -> None:
        assert worker.function is not None
        cell = _CELLS[worker.place]
        key = cell, worker.function
        server = self._servers[_server_of(*key)]
        worker.is_made = True
        is_resent = server.makers.get(key) == worker.name
        if server.counts[key] and (is_resent or self._flaw != "repeats"):
            if not is_resent:
                self._repeated.add((*key, worker.name))
        else:
            self.num_flaws += bool(server.counts[key])
            server.counts[key] += 1
            server.makers[key] = worker.name
            server.applied[_KINDS[cell]] += 1
        if self._is_durable and self._flaw != "answers early":
            server.write()

    def _answer(self, worker: _Worker) -> None:
        assert worker.function is not None
        cell = _CELLS[worker.place]
        number = _server_of(cell, worker.function)
        self._seen[number][-1] |= self._servers[number].applied
        self._note(worker, self._now_s, "ok")
        worker.is_sent = False
        worker.place += 1

    def _finish(self, worker: _Worker) -> None:
        assert worker.function is not None
        attempt = Attempt(
            worker.name, worker.function, (), worker.function_begun_s, self._now_s, "ok"
        )
        self._functions.append(attempt)
        self._done[worker.function] = [worker.name]
        self._metric += 1
        worker.function = None

    def _kill_worker(self, index: int) -> None:
        worker = self._workers[index]
        if worker.function is not None:
            if worker.is_sent:
                self._note(worker, float("inf"), "unknown")
            if self._flaw == "counts twice" and worker.place == len(_CELLS):
                self._metric += 1
                self.num_flaws += 1
            self._queue.appendleft(worker.function)
        self._workers[index] = self._new_worker()

    def _note(self, worker: _Worker, ended_s: float, outcome: str) -> None:
        assert worker.function is not None
        attempt = Attempt(
            worker.name,
            worker.function,
            (_CELLS[worker.place],),
            worker.begun_s,
            ended_s,
            outcome,
        )
        self._updates.append(attempt)

    def _crash(self, number: int) -> None:
        server = self._servers[number]
        before = server.counts
        server.restart()
        if self._flaw in ("skips entry", "answers early", "omits from entry"):
            self.num_flaws += before != server.counts
        self._seen[number].append(server.applied.copy())
        self._restored(number)
        crash = Span(self._now_s, self._now_s)
        self._crashes[number].append(crash)
        for worker in self._workers:  # an update without an answer is sent again
            worker.is_made = False

    def _restored(self, number: int) -> None:
        *_, before, after = self._seen[number]
        self._lost += before - after

    def _write_entries(self) -> None:
        """Writes entries of all servers, as a coordinator asks them to."""
        if self._flaw != "skips entry":
            for server in self._servers:
                server.write()
        self._entries.append(Span(self._now_s, self._now_s))

    def _write_own_entry(self, server: _Server) -> None:
        if self._flaw == "skips entry":
            return
        server.write()
        counts, applied = server.entry
        made = [key for key, count in counts.items() if count]
        if made and self._flaw == "omits from entry":
            counts[made[0]] -= 1
            applied[_KINDS[made[0][0]]] -= 1

    def _forget(self, counts: dict[str, dict[int, int]]) -> None:
        """Removes an update that was sent after the last loss of a server."""
        last_s = max((one.begun_s for some in self._crashes.values() for one in some), default=0.0)
        recent = [one for one in self._updates if one.begun_s > last_s and one.outcome == "ok"]
        if recent:
            forgotten = self._chance.choice(recent)
            counts[forgotten.cells[0]][forgotten.number] = 0
            self.num_flaws += 1


def _server_of(cell: str, number: int) -> int:
    return {"adds": 0, "rows": number % 2, "first": 0, "second": 1}[cell]
