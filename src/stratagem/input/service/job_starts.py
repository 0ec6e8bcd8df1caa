"""Consumers that join a job: which run of it they get, and when it begins."""

from __future__ import annotations

import dataclasses
import uuid
from typing import Any

from stratagem.errors import NotFoundError, UnavailableError
from stratagem.group.transport.wire import Message
from stratagem.input.service.members import Members
from stratagem.input.service.ranges import NumberRanges
from stratagem.input.service.restoring import JoinedStates
from stratagem.input.service.service_state import RunSpec, ServiceState
from stratagem.input.service.sharding import ShardingPolicy
from stratagem.input.service.splits import plan_splits, require_endless, require_repeatable
from stratagem.messages import explain

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
