"""Requests to a dispatcher: datasets, jobs, splits, and signs of life."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from stratagem.group.transport.listener import Request
from stratagem.group.transport.wire import Message
from stratagem.input.service.job import Record
from stratagem.input.service.job_starts import JobStarts, Members
from stratagem.input.service.service_state import JobRun, ServiceState
from stratagem.input.service.splits import ShardingPolicy, SourceFacts

# Workers and jobs of a dispatcher as JSON, for users and for scaling.


def describe(members: Members, runs: Iterable[JobRun]) -> dict[str, Any]:
    """Returns the workers by address, and the jobs.

    A worker has the number of batches that it has read and the seconds that this took. A consumer
    has the number of batches that it has taken, its age, and the seconds that it has waited.
    """
    return {
        "workers": {
            one.address: {"tags": one.tags, "num_read": one.num_read, "read_s": one.read_s}
            for one in members.workers.values()
        },
        "jobs": [_job(members, run) for run in runs],
    }


def _job(members: Members, run: JobRun) -> dict[str, Any]:
    spec, job = run.spec, run.job
    return {
        "job": spec.job if spec.is_named else None,
        "epoch": spec.epoch,
        "policy": ShardingPolicy(spec.policy).name,
        "num_consumers": len(job.consumers),
        "consumers": {
            consumer: load for (name, consumer), load in members.loads.items() if name == spec.run
        },
        "num_splits_done": len(job.done),
        "num_splits_lost": job.num_lost,
        "num_batches_skipped": len(job.skipped),
        "is_finished": job.is_finished,
    }


# Requests that are answered once there is something to say.


@dataclasses.dataclass(frozen=True)
class _Parked:
    """A request, how its answer is found, the answer without one, and what it waits for."""

    request: Request
    find: Callable[[], Message | None]
    otherwise: Message
    until_s: float
    tag: tuple[str, int] | None


class ParkedRequests:
    """Requests that wait. Not thread-safe: use under the lock of what they wait for."""

    def __init__(self) -> None:
        self._parked: list[_Parked] = []

    def answer_when(
        self,
        request: Request,
        find: Callable[[], Message | None],
        *,
        otherwise: Message,
        limit_s: float,
        tag: tuple[str, int] | None = None,
    ) -> None:
        """Answers with what `find` returns as soon as it is not None, else after `limit_s`.

        `tag` is a split that the request waits for.
        """
        if (answer := find()) is not None:
            request.answer(answer)
            return
        self._parked.append(_Parked(request, find, otherwise, time.monotonic() + limit_s, tag))

    def look_again(self) -> None:
        """Answers the requests that can be answered by now."""
        parked, self._parked = self._parked, []
        now_s = time.monotonic()
        for one in parked:
            try:
                answer = one.find()
            except Exception as error:  # noqa: BLE001 - sent to the waiting client
                one.request.fail(error)
                continue
            if answer is None and now_s >= one.until_s:
                answer = one.otherwise
            if answer is None:
                self._parked.append(one)
            else:
                one.request.answer(answer)

    def wanted_of(self, run: str) -> list[int]:
        """Returns the splits of a run that requests wait for."""
        return sorted({one.tag[1] for one in self._parked if one.tag and one.tag[0] == run})


# Longest time that a request of a worker or consumer waits for news: the interval of signs of life.
_MOST_NEWS_S = 1.0
# Least time that workers and consumers have to find a dispatcher that came back.
_RETURN_S = 5.0
_NO_SPLIT, _END = Message("wait"), Message("end")


class Dispatching:
    """Handles requests of workers and consumers, one at a time.

    Args:
        state: datasets and jobs.
        silence_s: seconds without a sign of life before a worker or consumer is lost.
        stuck_s: seconds that the reading of one batch may take.
        gc_s: seconds that a job without consumers is kept.
        worker_addresses: workers of static sharding; None without.
    """

    def __init__(
        self,
        state: ServiceState,
        *,
        silence_s: float,
        stuck_s: float,
        gc_s: float,
        worker_addresses: Sequence[str] | None,
    ) -> None:
        self._state = state
        self._silence_s = silence_s
        self._news_s = min(_MOST_NEWS_S, silence_s / 4)
        self._stuck_s = stuck_s
        self._gc_s = gc_s
        self._members = Members(worker_addresses)
        self._starts = JobStarts(state, self._members, silence_s=silence_s)
        self._parked = ParkedRequests()
        self._lock = threading.Lock()
        self._broken: dict[str, Any] | None = None
        self._began_s = time.monotonic()
        # Holders of splits and consumers in the journal count as heard when the dispatcher begins,
        # or later: they look for it every second.
        heard_s = self._began_s + max(0.0, _RETURN_S - silence_s)
        self._expected: dict[str, float] = {}
        self._left_s: dict[str, float] = {}  # since when a run has no consumers
        for name, run in state.runs.items():
            for consumer in run.job.consumers:
                self._members.heard_s[name, consumer] = heard_s
            for worker in run.job.holders:
                self._expected[worker] = heard_s

    def handle(self, request: Request) -> None:
        """Answers a request, now or later."""
        with self._lock, self._noting_broken_journal():
            getattr(self, f"_on_{request.message.kind}")(request, request.message.fields)
            self._parked.look_again()

    @contextlib.contextmanager
    def _noting_broken_journal(self) -> Generator[None]:
        """Makes an error of the journal one of all consumers: no job can continue."""
        try:
            yield
        except OSError as error:
            if self._broken is None:
                self._broken = {"kind": "journal", "text": str(error)}
                self._parked.look_again()
            raise

    def tick(self) -> None:
        """Notices lost workers and consumers, and jobs without consumers."""
        with self._lock, contextlib.suppress(OSError), self._noting_broken_journal():
            now_s = time.monotonic()
            before_s = now_s - self._silence_s
            for name in self._members.silent_workers(before_s):
                self._lose_worker(name)
            for name, heard_s in [*self._expected.items()]:
                if heard_s < before_s:
                    self._lose_worker(name)
            for (run, consumer), heard_s in [*self._members.heard_s.items()]:
                if heard_s < before_s:
                    self._leave(run, consumer)
            for name, run in [*self._state.runs.items()]:
                self._collect(name, run, now_s)
            self._parked.look_again()

    def describe(self) -> dict[str, Any]:
        """Returns the workers and jobs."""
        with self._lock:
            return describe(self._members, self._state.runs.values())

    # Datasets.

    def _on_register(self, request: Request, fields: dict[str, Any]) -> None:
        facts = SourceFacts(**fields["facts"])
        try:
            name = self._state.add_dataset(
                fields["dataset_id"],
                facts,
                request.message.arrays[0],
                compression=fields["compression"],
            )
        except ValueError as error:
            request.answer(Message("refused", {"kind": "ValueError", "text": str(error)}))
            return
        request.answer(Message("registered", {"dataset_id": name}))

    def _on_dataset(self, request: Request, fields: dict[str, Any]) -> None:
        dataset = self._state.datasets.get(fields["dataset_id"])
        if dataset is None:
            request.answer(Message("unknown"))
        else:
            request.answer(Message("dataset", {}, [dataset.pickled]))

    # Consumers.

    def _on_join(self, request: Request, fields: dict[str, Any]) -> None:
        self._parked.answer_when(
            request,
            lambda: self._starts.join(fields, time.monotonic()),
            otherwise=_NO_SPLIT,
            limit_s=float("inf"),  # `JobStarts` has its own limit.
        )

    def _on_watch_consumer(self, request: Request, fields: dict[str, Any]) -> None:
        run, consumer, seen = fields["run"], fields["consumer"], fields["seen"]
        if (run, consumer) in self._members.heard_s:
            self._members.heard_s[run, consumer] = time.monotonic()
            self._members.loads[run, consumer] = fields["load"]
        self._parked.answer_when(
            request,
            lambda: _news(self._view_of_consumer(run, consumer), seen),
            otherwise=Message("same"),
            limit_s=self._news_s,
        )

    def _view_of_consumer(self, name: str, consumer: str) -> dict[str, Any]:
        run = self._state.runs.get(name)
        if run is None or consumer not in run.job.consumers:
            return {"gone": self._state.ended.get(name, "unknown" if run is None else "silent")}
        job, workers = run.job, self._members.workers.values()
        return {
            "workers": {worker.name: worker.address for worker in workers},
            "awaited": _keyed(job.awaited_of(consumer)),
            "attempts": _keyed(job.attempts),
            "is_finished": job.is_finished,
            "error": self._broken or job.error,
            "num_consumers": len(job.consumers),
            "num_lost": job.num_lost,
            "skipped": job.skipped,
        }

    def _on_report(self, request: Request, fields: dict[str, Any]) -> None:
        run = self._state.runs.get(fields["run"])
        if run is not None:
            records = run.job.report(
                fields["reporter"], fields["split"], fields["attempt"], fields["ranges"]
            )
            self._change(fields["run"], records)
        request.answer(Message("noted"))

    def _on_leave(self, request: Request, fields: dict[str, Any]) -> None:
        self._leave(fields["run"], fields["consumer"])
        request.answer(Message("noted"))

    def _leave(self, name: str, consumer: str) -> None:
        self._members.heard_s.pop((name, consumer), None)
        self._members.loads.pop((name, consumer), None)
        run = self._state.runs.get(name)
        if run is not None and consumer in run.job.consumers:
            self._change(name, [{"what": "leave", "consumer": consumer}])
            self._left_s[name] = time.monotonic()
            if not run.spec.is_named and not run.job.consumers:
                self._state.end(name, "left")

    def _on_holder(self, request: Request, fields: dict[str, Any]) -> None:
        name, split = fields["run"], fields["split"]

        def find() -> Message | None:
            run = self._state.runs.get(name)
            if run is None or run.job.is_finished or run.job.error is not None:
                return _END
            if split in run.job.done:
                return _END
            held = run.job.holder_of(split)
            worker = self._members.workers.get(held[0]) if held else None
            if held is None or worker is None:
                return None
            return Message("holder", {"worker": worker.name, "attempt": held[1]})

        self._parked.answer_when(
            request, find, otherwise=_NO_SPLIT, limit_s=self._news_s, tag=(name, split)
        )

    # Workers.

    def _on_watch_worker(self, request: Request, fields: dict[str, Any]) -> None:
        name, seen = fields["worker"], fields["seen"]
        if name not in self._members.lost:
            try:
                former = self._members.hear_worker(
                    name, fields["address"], fields["tags"], time.monotonic()
                )
            except ValueError as error:
                request.answer(Message("refused", {"kind": "ValueError", "text": str(error)}))
                return
            self._expected.pop(name, None)
            worker = self._members.workers[name]
            worker.num_read, worker.read_s = fields["num_read"], fields["read_s"]
            for other in former:
                self._lose_worker(other)
            for run, split, attempt, seconds in fields["reading"]:
                if seconds > self._stuck_s:
                    self._revoke(name, run, split, attempt)
        self._parked.answer_when(
            request,
            lambda: _news(self._view_of_worker(name), seen),
            otherwise=Message("same"),
            limit_s=self._news_s,
        )

    def _view_of_worker(self, name: str) -> dict[str, Any]:
        if name not in self._members.workers:
            return {"is_lost": True}
        return {
            "runs": {
                run: {
                    **found.spec.for_workers(),
                    "consumers": sorted(found.job.consumers),
                    "num_joined": found.job.num_joined,
                    "wanted": [
                        split
                        for split in self._parked.wanted_of(run)
                        if found.job.holder_of(split) is None
                    ],
                }
                for run, found in self._state.runs.items()
                if not found.job.is_finished and found.job.error is None
            },
            "revoked": self._members.workers[name].revoked,
        }

    def _revoke(self, worker: str, name: str, split: int, attempt: int) -> None:
        run = self._state.runs.get(name)
        records = [] if run is None else run.job.lose_split(worker, split, attempt)
        if records:
            self._members.workers[worker].revoked.append([name, split, attempt])
            self._change(name, records)

    def _on_next_split(self, request: Request, fields: dict[str, Any]) -> None:
        name, worker = fields["run"], fields["worker"]
        holding = {int(split): attempt for split, attempt in fields["holding"].items()}

        def find() -> Message | None:
            run = self._state.runs.get(name)
            if run is None or run.job.is_finished or run.job.error is not None:
                return _END
            if worker not in self._members.workers:
                return _END
            if self._members.workers[worker].is_retiring:
                return None
            only = self._parked.wanted_of(name) if fields["only_wanted"] else None
            reserved = self._reserved(run, worker)
            records, split = run.job.next_split(worker, holding, reserved, only=only)
            self._change(name, records)
            return None if split is None else Message("split", split)

        limit_s = 0.0 if fields["only_wanted"] else self._news_s
        self._parked.answer_when(request, find, otherwise=_NO_SPLIT, limit_s=limit_s)

    def _reserved(self, run: JobRun, worker: str) -> set[int]:
        if not ShardingPolicy(run.spec.policy).is_static:
            return set()
        may_wait = time.monotonic() < self._began_s + self._silence_s
        return self._members.reserved_for_others(worker, may_wait=may_wait)

    def _on_done_split(self, request: Request, fields: dict[str, Any]) -> None:
        run = self._state.runs.get(fields["run"])
        if run is not None:
            records = run.job.done_split(fields["worker"], fields["split"], fields["attempt"])
            self._change(fields["run"], records)
        request.answer(Message("noted"))

    def _on_fail(self, request: Request, fields: dict[str, Any]) -> None:
        run = self._state.runs.get(fields["run"])
        if run is not None and run.job.error is None:
            error = fields["error"]
            is_current = "split" not in error or run.job.holder_of(error["split"]) == (
                fields["worker"],
                error["attempt"],
            )
            if is_current:
                records, is_skipped = run.job.fail(error)
                self._change(fields["run"], records)
                if is_skipped:
                    request.answer(Message("skip"))
                    return
        request.answer(Message("noted"))

    def _on_stop_worker(self, request: Request, fields: dict[str, Any]) -> None:
        self._lose_worker(fields["worker"])
        request.answer(Message("noted"))

    def _on_lose_worker(self, request: Request, fields: dict[str, Any]) -> None:
        for worker in self._members.workers_at(fields["address"]):
            self._lose_worker(worker)
        request.answer(Message("noted"))

    def _on_retire_worker(self, request: Request, fields: dict[str, Any]) -> None:
        """Gives a worker no more splits; it may stop once nothing would be lost with it."""
        workers = self._members.workers_at(fields["address"])
        for worker in workers:
            self._members.workers[worker].is_retiring = True
        runs = self._state.runs.values()
        must_finish = any(run.job.must_finish(worker) for run in runs for worker in workers)
        request.answer(_NO_SPLIT if must_finish else Message("noted"))

    def _lose_worker(self, worker: str) -> None:
        self._members.remove_worker(worker)
        self._expected.pop(worker, None)
        for name, run in [*self._state.runs.items()]:
            self._change(name, run.job.lose_worker(worker))

    # Jobs.

    def _change(self, name: str, records: list[Record]) -> None:
        self._state.change(name, records)
        run = self._state.runs[name]
        if finished := run.job.finish([*self._members.workers]):
            self._state.change(name, finished)

    def _collect(self, name: str, run: JobRun, now_s: float) -> None:
        """Notices the end of a job, and forgets it some time after its last consumer left."""
        self._change(name, [])
        if run.job.consumers:
            self._left_s.pop(name, None)
        elif now_s > self._left_s.setdefault(name, now_s) + self._gc_s:
            self._state.end(name, "collected")


def _keyed(numbers: dict[int, int]) -> dict[str, int]:
    return {str(key): value for key, value in sorted(numbers.items())}


def _news(view: dict[str, Any], seen: int) -> Message | None:
    """Returns a view unless the peer has seen it, by its checksum."""
    checksum = zlib.crc32(json.dumps(view, sort_keys=True).encode())
    return None if checksum == seen else Message("view", {"view": view, "checksum": checksum})
