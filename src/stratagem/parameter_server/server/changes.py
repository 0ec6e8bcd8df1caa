"""Deduplication of client requests that change server state.

Each client numbers its requests and has one outstanding at a time. After a lost answer it resends
the same number, possibly to a server that restarted from its journal. The change is made only once.

A function that runs again, because its worker was lost, is another client, possibly in another
process. Its updates are identified by the function and their place in it: those that one run made,
the other does not make. The worker may have been silent and not dead, or its last request may be
late, so the first run may go on during and after the second.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from stratagem.errors import explain
from stratagem.group.transport.listener import Request
from stratagem.group.transport.wire import Message

# Counts of a server's updates by kind.

# Subtracting counts as adding. One synchronous update is several pushes.
KINDS: tuple[str, ...] = ("assign", "assign_add", "scatter", "scatter_add", "push")


def kind_of(message: Message) -> str | None:
    """Returns the kind of an update; None for another request."""
    if message.kind == "push":
        return "push"
    if message.kind not in ("assign", "scatter"):
        return None
    return f"{message.kind}_add" if message.fields.get("sign") else message.kind


class UpdateCounts:
    """Updates by kind. Callers serialize changes.

    `resent` counts copies of a request that arrived after it was carried out or while it was;
    `repeated` counts updates of a function that ran again. Neither was applied again.
    """

    def __init__(self) -> None:
        self.applied: Counter[str] = Counter()
        self.resent: Counter[str] = Counter()
        self.repeated: Counter[str] = Counter()

    def numbers(self) -> list[int]:
        """Returns the numbers of applied updates of `KINDS`, for answers."""
        return [self.applied[kind] for kind in KINDS]

    def saved(self) -> dict[str, list[int]]:
        """Returns all counts by outcome, each in the order of `KINDS`, for a journal."""
        return {name: [one[kind] for kind in KINDS] for name, one in vars(self).items()}

    def restore(self, saved: Mapping[str, Sequence[int]]) -> None:
        """Restores the result of `saved` from a journal."""
        for name in vars(self):
            pairs = zip(KINDS, saved[name], strict=True)
            setattr(self, name, Counter({kind: int(number) for kind, number in pairs if number}))

    def described(self) -> dict[str, Mapping[str, int]]:
        """Returns all counts, by outcome and kind."""
        return {name: dict(one) for name, one in vars(self).items()}


# Least recently active clients are dropped beyond this limit. Each worker thread is a client.
_MOST_CLIENTS = 4096
# A restarted coordinator numbers its messages anew, which leaves functions of the former one.
_MOST_FUNCTIONS = 4096
# Functions that ran again are forgotten beyond this limit, the oldest first.
_MOST_RERUNS = 4096

Outcome = Mapping[str, Any]
# Outcome of an update that an earlier run of its function made.
_REPEATED: Outcome = {"is_used": True, "is_repeated": True}


@dataclasses.dataclass
class _Client:
    """Last finished change of a client, and those in progress.

    `functions` has, for each function that may run again, the place of its last applied update, and
    the order of the coordinator's message; the latest is last.
    """

    number: int = 0
    outcome: Outcome = dataclasses.field(default_factory=dict[str, Any])
    functions: dict[str, tuple[int, int]] = dataclasses.field(
        default_factory=dict[str, tuple[int, int]]
    )
    doing: dict[int, Change] = dataclasses.field(default_factory=dict[int, "Change"])


class Change:
    """A change request in progress. Resent copies of the request wait for the same answer.

    `number` is that of the request among the client's changes. `origin` has the function that a
    worker ran, "" for none, and the place of this change in it; `is_of_rerun` is True if the
    function may have run before, on a lost worker.
    """

    def __init__(self, owner: Changes, request: Request) -> None:
        self.message = request.message
        self.requests = [request]
        self._owner = owner
        fields = request.message.fields
        self.client: str = fields["client"]
        self.number: int = fields["number"]
        self.origin: tuple[str, int] = fields.get("function", ""), fields.get("place", 0)
        self.is_of_rerun = bool(fields.get("is_rerun"))

    def answer_repeated(self) -> bool:
        """Answers an update that another run of its function has made; False if none has.

        Call within `ServerVariables.changing`, before the update is made: another run may just be
        making it.
        """
        outcome = self._owner.note_repeated(self)
        if outcome is None:
            return False
        self._owner.deliver(self.requests, outcome)
        return True

    def done(self, **outcome: object) -> None:
        """Answers the request; `outcome` is also the answer to later resends.

        Call within `ServerVariables.changing`, so that a journal entry has both the change and its
        outcome, or neither.
        """
        try:
            self._owner.deliver(self.requests, self._owner.finish(self, outcome))
        except Exception as error:  # noqa: BLE001 - sent to the client
            self.fail(error)

    def answer_undone(self, message: Message) -> None:
        """Answers a request that was not carried out, and may be sent again."""
        self._owner.forget(self)
        for request in self.requests:
            request.answer(message)

    def fail(self, error: BaseException) -> None:
        """Answers with an error. Before `done`, a resent request is then carried out again."""
        self._owner.forget(self)
        for request in self.requests:
            request.fail(error)


class Changes:
    """Thread-safe record of each client's last change; `answer` builds a reply from an outcome.

    `counts` has the updates by kind. `hold`, if set, takes requests and their answer, to send it
    once the change is in the journal.
    """

    def __init__(self, answer: Callable[[Message, Outcome], Message]) -> None:
        self._answer = answer
        self._lock = threading.Lock()
        self._clients: dict[str, _Client] = {}
        # Places of the last applied updates of functions that ran again.
        self._reruns: dict[str, int] = {}
        self.num_done = 0
        self.counts = UpdateCounts()
        self.hold: Callable[[Sequence[Request], Message], None] | None = None

    def begin(self, request: Request) -> Change | None:
        """Returns the change to carry out, or None for a repeated one, which is answered here."""
        change = Change(self, request)
        kind = kind_of(change.message) or ""
        with self._lock:
            client = self._clients.setdefault(change.client, _Client())
            first = client.doing.get(change.number)
            if first is not None:
                self.counts.resent[kind] += 1
                first.requests.append(request)
                return None
            if change.number <= client.number:
                self.counts.resent[kind] += 1
                outcome = client.outcome
            else:
                client.doing[change.number] = change
                return change
        self.deliver([request], self._answer(request.message, outcome))
        return None

    def deliver(self, requests: Sequence[Request], answer: Message) -> None:
        """Sends an answer, or holds it until the journal has the change."""
        if self.hold is not None:
            self.hold(requests, answer)
            return
        for request in requests:
            request.answer(answer)

    def note_repeated(self, change: Change) -> Message | None:
        """Records an update that another run of its function has made, and returns the answer.

        Returns None for any other change.
        """
        if not change.origin[1]:  # of no function
            return None
        kind = kind_of(change.message)
        with self._lock:
            if kind is None or not self._is_applied(change):
                return None
            self.counts.repeated[kind] += 1
            self._note(change.client, change.number, _REPEATED)
        return self._answer(change.message, _REPEATED)

    def finish(self, change: Change, outcome: Outcome) -> Message:
        """Records the outcome of a change, and returns the answer.

        Records first: the change is made, and must not be made again if there is no answer.
        """
        with self._lock:
            is_applied = bool(outcome.get("is_used", True))
            self._note(change.client, change.number, outcome)
            if is_applied:
                self._note_function(change)
            kind = kind_of(change.message)
            if kind is not None and is_applied:
                self.counts.applied[kind] += 1
        return self._answer(change.message, outcome)

    def forget(self, change: Change) -> None:
        """Removes a failed change."""
        with self._lock:
            client = self._clients.get(change.client)
            if client is not None:
                client.doing.pop(change.number, None)
                if not client.doing and not client.number:
                    del self._clients[change.client]

    def saved(self) -> dict[str, Any]:
        """Returns each client's last change, and functions that ran again, for a journal.

        A change is the client, number, outcome, and places in functions.
        """
        with self._lock:
            clients = [
                [name, client.number, dict(client.outcome), dict(client.functions)]
                for name, client in self._clients.items()
                if client.number
            ]
            return {"clients": clients, "reruns": dict(self._reruns)}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restores the result of `saved` from a journal."""
        with self._lock:
            for name, number, outcome, functions in saved["clients"]:
                self._note(name, number, outcome)
                self._clients[name].functions = {
                    one: (int(place), int(order)) for one, (place, order) in functions.items()
                }
            self._reruns = {one: int(place) for one, place in saved["reruns"].items()}

    def _is_applied(self, change: Change) -> bool:
        """Returns True if another run of the function made this change."""
        function, place = change.origin
        if change.is_of_rerun and function not in self._reruns:
            clients = self._clients.values()
            places = (client.functions.get(function, (0, 0))[0] for client in clients)
            self._reruns[function] = max(places, default=0)
            if len(self._reruns) > _MOST_RERUNS:
                del self._reruns[next(iter(self._reruns))]
        return 0 < place <= self._reruns.get(function, 0)

    def _note(self, name: str, number: int, outcome: Outcome) -> None:
        client = self._clients.pop(name, None) or _Client()
        self._clients[name] = client  # most recent last
        client.doing.pop(number, None)
        self.num_done += 1
        if number > client.number:
            client.number, client.outcome = number, outcome
        if len(self._clients) > _MOST_CLIENTS:
            idle = (other for other, client in self._clients.items() if not client.doing)
            self._clients.pop(next(idle, name), None)

    def _note_function(self, change: Change) -> None:
        """Records an update of a function, and forgets functions that will not run again."""
        function, place = change.origin
        if not function:
            return
        fields, functions = change.message.fields, self._clients[change.client].functions
        functions.pop(function, None)
        functions[function] = (place, fields["order"])
        while functions:
            first, (_, order) = next(iter(functions.items()))
            if order >= fields["first_open"] and len(functions) <= _MOST_FUNCTIONS:
                break
            del functions[first]
        if function in self._reruns:
            self._reruns[function] = max(place, self._reruns[function])


# Server versions: update counts sent by servers and seen by clients.
#
# A restarted server may have lost its last updates, so an update count alone is ambiguous. Servers
# also send a lifetime number, which grows with each restart.

_NEVER = (0, 0)


@dataclasses.dataclass(frozen=True)
class Lifetime:
    """One run of a server, from start to exit.

    Args:
        number: larger than in all earlier runs.
        restored_version: version restored from the journal; None if nothing was restored.
        restored_applied: restored numbers of applied updates, by `KINDS`.
    """

    number: int
    restored_version: int | None = None
    restored_applied: tuple[int, ...] = (0,) * len(KINDS)

    def fields(self, version: int, applied: Sequence[int]) -> dict[str, Any]:
        """Returns the answer fields that describe this run.

        `version` and `applied`, the numbers of updates by `KINDS`, are those of now.
        """
        fields = {"version": version, "lifetime": self.number, "applied": applied}
        if self.restored_version is None:
            return fields
        restored = {
            "restored_version": self.restored_version,
            "restored_applied": self.restored_applied,
        }
        return {**fields, **restored}

    def version_of(self, fields: Mapping[str, Any]) -> int:
        """Returns the version, in this run, of the values behind a request.

        Values from an earlier run count as at most the restored version.
        """
        version = int(fields["version"])
        if fields.get("lifetime", self.number) == self.number:
            return version
        return min(version, self.restored_version or 0)


def by_kind(losses: Mapping[str, int]) -> Counter[str]:
    """Returns the lost updates by kind of those by server, run and kind."""
    counts: Counter[str] = Counter()
    for key, count in losses.items():
        counts[key.rpartition("/")[2]] += count
    return counts


@dataclasses.dataclass
class _SeenRun:
    """Numbers of updates by `KINDS` of one run of a server: restored at its start, and newest."""

    restored: list[int]
    newest: list[int]


class SeenVersions:
    """Per-thread versions of all servers, and the updates that each run of a server lost.

    A push counts as one update, and the pushes of a synchronous update as one together.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self._lock = threading.Lock()
        self._runs: dict[int, dict[int, _SeenRun]] = {}  # by server and lifetime

    @property
    def losses(self) -> dict[str, int]:
        """Lost updates by "server/lifetime/kind": seen in a run, but not restored by the next.

        Clients see different updates last, so the truth of a run is the largest number of all
        clients. Sums over several runs cannot be compared that way.
        """
        losses: dict[str, int] = {}
        with self._lock:
            for server, runs in self._runs.items():
                for lifetime, after in itertools.pairwise(sorted(runs)):
                    pairs = zip(KINDS, runs[lifetime].newest, runs[after].restored, strict=True)
                    for kind, newest, restored in pairs:
                        if newest > restored:
                            losses[f"{server}/{lifetime}/{kind}"] = newest - restored
        return losses

    def note(self, server: int, answer: Message, names: Iterable[str] = ()) -> None:
        """Records the version in an answer that has the values of these variables."""
        fields = answer.fields
        seen = int(fields["lifetime"]), int(fields["version"])
        own = self._own()
        own.update(dict.fromkeys([(server, name) for name in names], seen))
        own[server, None] = seen
        counts: list[int] = fields["applied"]
        counts[-1] = seen[1]  # the version counts pushes
        with self._lock:
            runs = self._runs.setdefault(server, {})
            run = runs.get(seen[0])
            if run is None:
                restored = [*fields.get("restored_applied", (0,) * len(KINDS))]
                restored[-1] = fields.get("restored_version") or 0
                run = runs[seen[0]] = _SeenRun(restored, counts)
            if counts != run.newest:
                run.newest = [*map(max, run.newest, counts)]

    def note_own_update(self, server: int) -> None:
        """Makes values just before this thread's last update as new as it; no other came between.

        A step that sends several updates would be late by its own ones.
        """
        own = self._own()
        lifetime, version = own[server, None]
        before = lifetime, version - 1
        own.update({key: own[server, None] for key, seen in own.items() if seen == before})

    def of(self, server: int, names: Iterable[str]) -> dict[str, int]:
        """Returns the request fields with the version of this thread's values.

        If the variables in `names` have different versions, the oldest one counts.
        """
        own = self._own()
        last = own.get((server, None), _NEVER)
        lifetime, version = min((own.get((server, name), last) for name in names), default=last)
        return {"lifetime": lifetime, "version": version}

    def _own(self) -> dict[tuple[int, str | None], tuple[int, int]]:
        own = getattr(self._local, "versions", None)
        if own is None:
            own = self._local.versions = {}
        return own


# Warnings about updates that servers lost, and about those that they did not repeat.


class LostUpdates:
    """Warns when a process sees that servers lost updates, or that functions ran again.

    `losses` has the largest numbers of lost updates so far, by server, run and kind; `num_repeated`
    counts updates that a function made again and servers dropped. `worker` None means the only
    process.
    """

    def __init__(self, worker: int | None = None) -> None:
        self._name = "this process" if worker is None else f"worker {worker}"
        self.losses: Counter[str] = Counter()
        self.num_repeated = 0

    def note(self, losses: Mapping[str, int]) -> None:
        """Warns if `losses`, a client's `SeenVersions.losses`, have grown."""
        if not losses:
            return
        before = self.losses
        self.losses = before | Counter(dict(losses))
        if self.losses == before:
            return
        counts = by_kind(self.losses)
        total = counts.total()
        lost = "1 update was" if total == 1 else f"{total} updates were"
        kinds = ", ".join(f"{kind}: {count}" for kind, count in sorted(counts.items()))
        warnings.warn(
            explain(
                f"Parameter servers restarted from their journals: {self._name} has seen that "
                f"{lost} lost in all ({kinds}). Training continues.",
                expected="servers that run until the end of training.",
                fix="look at the servers' logs to find out why they stopped. To lose no update, "
                "set sg.coordinator.options(durable_updates=True).",
            ),
            RuntimeWarning,
            stacklevel=2,
        )

    def note_repeated(self, count: int) -> None:
        """Warns if `count`, the repeated updates of a worker's run, is not 0 for the first time.

        The count begins again when the worker restarts.
        """
        if count > 0 and not self.num_repeated:
            warnings.warn(
                explain(
                    f"A function ran again on {self._name}, because an earlier run was lost: "
                    f"{count} of its updates had been applied and were not applied again.",
                    expected="functions that make their updates in the same order each time.",
                    fix="nothing, if they do. See the counts in ClusterCoordinator.updates().",
                ),
                RuntimeWarning,
                stacklevel=2,
            )
        self.num_repeated = max(self.num_repeated, count)
