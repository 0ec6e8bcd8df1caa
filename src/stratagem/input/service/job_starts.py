"""Consumers that join a job: which run of it they get, and when it begins."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from stratagem.cluster.addresses import without_scheme
from stratagem.errors import NotFoundError, UnavailableError, explain
from stratagem.group.transport.wire import Message
from stratagem.input.service.job import NumberRanges
from stratagem.input.service.service_state import RunSpec, ServiceState
from stratagem.input.service.splits import (
    ShardingPolicy,
    plan_splits,
    require_endless,
    require_repeatable,
)

# Joins the states of all consumers of a job, so that it resumes where they stopped.


class JoinedStates:
    """Positions of the consumers of one job, collected until all have joined."""

    def __init__(self) -> None:
        self._states: dict[str, Mapping[str, Any]] = {}

    def add(self, consumer: str, state: Mapping[str, Any]) -> None:
        """Adds the position of a consumer."""
        self._states[consumer] = state

    @property
    def consumers(self) -> Collection[str]:
        """Consumers that have joined."""
        return self._states.keys()

    @property
    def num_expected(self) -> int:
        """Number of consumers that the job had."""
        return max(state["num_consumers"] for state in self._states.values())

    @property
    def num_lanes(self) -> int | None:
        """Number of lanes of coordinated reads, None for other jobs."""
        return next(iter(self._states.values()))["num_lanes"]

    @property
    def is_complete(self) -> bool:
        """True if all consumers have joined."""
        return len(self._states) >= self.num_expected

    def done(self) -> NumberRanges:
        """Returns the splits of which no batch is left."""
        states = [*self._states.values()]
        done = NumberRanges()
        for state in states:
            done.update(NumberRanges(state["done"]))
        # A split is also done if each consumer has gone past its share.
        first, *others = (NumberRanges(state["passed"]) for state in states)
        for split in first:
            if all(split in other for other in others):
                done.add(split)
        return done

    def received(self) -> dict[str, list[list[int]]]:
        """Returns the batches that any consumer has, by split."""
        joined: dict[str, NumberRanges] = {}
        for state in self._states.values():
            for split, ranges in state["parts"].items():
                joined.setdefault(split, NumberRanges()).update(NumberRanges(ranges))
        return {split: numbers.as_json() for split, numbers in joined.items()}


# Workers and consumers of a dispatcher: where they are, and when they were last heard.

_ANY_PORT = "%port%"


@dataclasses.dataclass
class InputWorker:
    """A live worker. `revoked` are splits that were taken from it: run, split, attempt."""

    name: str
    address: str
    index: int | None  # in the list of the configuration
    tags: list[str]
    heard_s: float
    revoked: list[list[object]] = dataclasses.field(default_factory=list[list[object]])
    is_retiring: bool = False  # It gets no more splits.
    num_read: int = 0
    read_s: float = 0.0


class Members:
    """Live workers, and the last signs of life of consumers.

    `addresses` are the workers of static sharding, None without. Times are arguments.
    """

    def __init__(self, addresses: Sequence[str] | None) -> None:
        self._addresses = None if addresses is None else [without_scheme(one) for one in addresses]
        self.workers: dict[str, InputWorker] = {}
        self.lost: set[str] = set()  # they must begin anew under another name
        self.heard_s: dict[tuple[str, str], float] = {}  # by run and consumer
        self.loads: dict[tuple[str, str], dict[str, float]] = {}  # the same

    @property
    def num_listed(self) -> int | None:
        """Number of workers in the list of the configuration, None without."""
        return None if self._addresses is None else len(self._addresses)

    def hear_worker(self, name: str, address: str, tags: list[str], now_s: float) -> list[str]:
        """Notes a sign of life, and returns the names of former workers at this address.

        Raises ValueError for a worker that the configuration does not list.
        """
        if name in self.workers:
            self.workers[name].heard_s = now_s
            return []
        former = [worker.name for worker in self.workers.values() if worker.address == address]
        taken = {worker.index for worker in self.workers.values() if worker.name not in former}
        index = self._index_of(address, taken)
        self.workers[name] = InputWorker(name, address, index, tags, now_s)
        return former

    def _index_of(self, address: str, taken: Iterable[int | None]) -> int | None:
        if self._addresses is None:
            return None
        address = without_scheme(address)
        host = address.rpartition(":")[0]
        for index, listed in enumerate(self._addresses):
            is_any = listed in (host, f"{host}:{_ANY_PORT}")
            if index not in taken and (listed == address or is_any):
                return index
        raise ValueError(
            explain(
                f"A worker at {address} asked to join.",
                expected=f"one of DispatcherConfig.worker_addresses, {self._addresses}, each once.",
                fix="add its address, or correct WorkerConfig.worker_address.",
            )
        )

    def silent_workers(self, before_s: float) -> list[str]:
        """Returns the workers that were last heard before a time."""
        return [worker.name for worker in self.workers.values() if worker.heard_s < before_s]

    def workers_at(self, address: str) -> list[str]:
        """Returns the names of the live workers at an address, with or without `tcp://`."""
        wanted = without_scheme(address)
        return [
            worker.name
            for worker in self.workers.values()
            if without_scheme(worker.address) == wanted
        ]

    def remove_worker(self, name: str) -> None:
        """Forgets a worker."""
        self.lost.add(name)
        self.workers.pop(name, None)

    def reserved_for_others(self, name: str, *, may_wait: bool) -> set[int]:
        """Returns the splits of static sharding that belong to other workers.

        These are live, or may still come if `may_wait`.
        """
        if self._addresses is None:
            return set()
        own = self.workers[name].index
        live = {worker.index for worker in self.workers.values()}
        return {
            index
            for index in range(len(self._addresses))
            if index != own and (may_wait or index in live)
        }


# Processes that resume together may start at different times.
_LEAST_LIMIT_S = 5.0
_SHARED = ("dataset_id", "policy", "num_consumers", "is_exact", "skip_errors", "is_shared")


@dataclasses.dataclass
class _Restore:
    """A job that is restored: states of its consumers, and its run once it has begun."""

    until_s: float
    states: JoinedStates = dataclasses.field(default_factory=JoinedStates)
    run: str | None = None


class JobStarts:
    """Finds or begins the run of a job for each consumer.

    A job that is resumed begins a new run once all its consumers have joined, which may take
    several times `silence_s`.
    """

    def __init__(self, state: ServiceState, members: Members, *, silence_s: float) -> None:
        self._state = state
        self._members = members
        self._silence_s = silence_s
        self._limit_s = max(_LEAST_LIMIT_S, 2 * silence_s)
        self._restores: dict[tuple[str, int], _Restore] = {}

    def join(self, fields: dict[str, Any], now_s: float) -> Message | None:
        """Returns the answer to a consumer, None while others are missing."""
        key = fields["job"], fields["epoch"]
        try:
            if fields["state"] is None:
                current = self._current(key)
                name = self._begin(fields, None) if current is None else current
                self._check(name, fields)
            else:
                found = self._restored(key, fields, now_s)
                if found is None:
                    return None
                name = found
        except (ValueError, NotFoundError, UnavailableError) as error:
            kind = type(error).__name__
            return Message("refused", {"kind": kind, "text": str(error.args[0])})
        run = self._state.runs[name]
        self._members.heard_s[name, fields["consumer"]] = now_s
        if fields["consumer"] not in run.job.consumers:
            self._state.change(name, [{"what": "join", "consumer": fields["consumer"]}])
        answer = {
            "run": name,
            "num_lanes": run.spec.num_lanes,
            "num_splits": run.spec.plan.count,
            "silence_s": self._silence_s,
            "num_joined": run.job.num_joined,
        }
        return Message("joined", answer)

    def _current(self, key: tuple[str, int]) -> str | None:
        runs = self._state.runs.items()
        return next((name for name, run in runs if (run.spec.job, run.spec.epoch) == key), None)

    def _restored(self, key: tuple[str, int], fields: dict[str, Any], now_s: float) -> str | None:
        restore = self._restores.get(key)
        if restore is None or fields["consumer"] not in restore.states.consumers:
            if restore is None or restore.run is not None:
                restore = self._restores[key] = _Restore(now_s + self._limit_s)
            restore.states.add(fields["consumer"], fields["state"])
        states = restore.states
        if restore.run is None and states.is_complete:
            former = self._current(key)
            if former is not None:
                self._state.end(former, "restored")
            restore.run = self._begin(fields, states)
        if restore.run is None and now_s >= restore.until_s:
            self._restores.pop(key)
            raise UnavailableError(
                explain(
                    f"{len(states.consumers)} of {states.num_expected} consumers of the job "
                    f"resumed it within {self._limit_s:g} s.",
                    expected="all consumers that it had, each from its own state.",
                    fix="resume them together, or begin the job anew under another job_name.",
                )
            )
        return restore.run

    def _check(self, name: str, fields: dict[str, Any]) -> None:
        """Raises ValueError if a consumer wants something else of the job."""
        spec = vars(self._state.runs[name].spec)
        differing = [one for one in _SHARED if spec[one] != fields[one]]
        if differing:
            received = {one: fields[one] for one in differing}
            raise ValueError(
                explain(
                    f"A consumer asked for the job {fields['job']!r} with {received}.",
                    expected=f"{ {one: spec[one] for one in differing} }, as the consumers before.",
                    fix="pass the same dataset and options in all consumers, or another job_name.",
                )
            )

    def _begin(self, fields: dict[str, Any], states: JoinedStates | None) -> str:
        dataset = self._state.datasets.get(fields["dataset_id"])
        if dataset is None:
            raise NotFoundError(
                explain(
                    f"dataset_id={fields['dataset_id']!r} is not registered.",
                    expected="an id that register_dataset returned.",
                    fix="register the dataset at this dispatcher; without fault_tolerant_mode, a "
                    "dispatcher forgets datasets when it stops.",
                )
            )
        if fields["is_exact"]:
            require_repeatable(dataset.facts)
        if fields["is_shared"]:
            require_endless(dataset.facts)
        policy, num_consumers = ShardingPolicy(fields["policy"]), fields["num_consumers"]
        num_lanes = None if states is None else states.num_lanes
        if num_lanes is None:
            num_lanes = max(1, len(self._members.workers))
        count = self._members.num_listed
        if policy is ShardingPolicy.OFF:
            count = None if num_consumers is None else num_lanes
        spec = RunSpec(
            run=uuid.uuid4().hex,
            job=fields["job"],
            is_named=fields["is_named"],
            epoch=fields["epoch"],
            dataset_id=fields["dataset_id"],
            policy=int(policy),
            num_consumers=num_consumers,
            num_lanes=num_lanes,
            is_exact=fields["is_exact"],
            is_repeatable=dataset.facts.is_repeatable,
            is_shared=fields["is_shared"],
            compression=dataset.compression,
            skip_errors=fields["skip_errors"],
            plan=plan_splits(dataset.facts, policy, count),
            done=(NumberRanges() if states is None else states.done()).as_json(),
            received={} if states is None else states.received(),
        )
        return self._state.begin(spec).spec.run
