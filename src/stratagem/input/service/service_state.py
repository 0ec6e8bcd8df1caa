"""Datasets and jobs of a dispatcher, and their journal."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from stratagem.errors import explain
from stratagem.group.transport.journal import Journal
from stratagem.group.transport.journal_lock import JournalLock
from stratagem.group.transport.wire import Message
from stratagem.input.batch_messages import AUTO
from stratagem.input.service.job import NumberRanges, Record, ServiceJob
from stratagem.input.service.splits import ShardingPolicy, SourceFacts, SplitPlan
from stratagem.resources import Closing

_JOURNAL = "dispatcher.journal"


@dataclasses.dataclass(frozen=True)
class RegisteredDataset:
    """A pickled source, the facts about it, and the compression of its batches."""

    dataset_id: str
    facts: SourceFacts
    pickled: np.ndarray
    compression: str | None = AUTO


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """One epoch of a job, as JSON.

    Args:
        run: identifier.
        job: name of the job, or a random one.
        is_named: other consumers can join by the name.
        epoch: epoch number.
        dataset_id: the dataset.
        policy: number of the `ShardingPolicy`.
        num_consumers: number of consumers in coordinated reads; else None.
        num_lanes: number of splits that coordinated reads take turns with.
        is_exact: the job promises that each batch is visited exactly once.
        is_repeatable: a split that is opened again has the same batches.
        skip_errors: number of batches that may be skipped because they cannot be read.
        plan: the splits.
        done: splits that were done in a restored state, as ranges.
        received: ranges of batches that consumers had in a restored state, by split.
        is_shared: each trainer gets all batches, from a window.
        compression: of batches between machines or everywhere; see `checked_compression`.
    """

    run: str
    job: str
    is_named: bool
    epoch: int
    dataset_id: str
    policy: int
    num_consumers: int | None
    num_lanes: int
    is_exact: bool
    is_repeatable: bool
    skip_errors: int
    plan: SplitPlan
    done: list[list[int]]
    received: dict[str, list[list[int]]]
    is_shared: bool = False
    compression: str | None = AUTO

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RunSpec:
        """Returns what `dataclasses.asdict` made into JSON."""
        changed: dict[str, Any] = {"plan": SplitPlan(**values["plan"])}
        return cls(**(values | changed))

    def for_workers(self) -> dict[str, Any]:
        """Returns the fields that workers need, as JSON."""
        names = ("dataset_id", "epoch", "num_consumers", "is_exact", "compression", "is_shared")
        fields = {name: getattr(self, name) for name in names}
        return {**fields, "skip_errors": self.skip_errors, "plan": vars(self.plan)}

    def make_job(self) -> ServiceJob:
        """Returns the job at its start."""
        is_off = self.policy == ShardingPolicy.OFF
        return ServiceJob(
            self.plan.count,
            one_each=is_off and self.num_consumers is None,
            is_repeatable=self.is_repeatable,
            is_exact=self.is_exact,
            skip_errors=self.skip_errors,
            done=NumberRanges(self.done),
            received={int(key): NumberRanges(value) for key, value in self.received.items()},
        )


@dataclasses.dataclass
class JobRun:
    """One epoch of a job and its state."""

    spec: RunSpec
    job: ServiceJob


class ServiceState(Closing):
    """All datasets and jobs; changes go to a journal first, if there is one.

    Args:
        work_dir: folder of the journal; None for none.

    Raises:
        DataLossError: the journal is damaged.
        UnavailableError: another dispatcher uses the folder.
    """

    def __init__(self, work_dir: str | None) -> None:
        self.datasets: dict[str, RegisteredDataset] = {}
        self.runs: dict[str, JobRun] = {}
        self.ended: dict[str, str] = {}  # reason, by run
        self._journal: Journal | None = None
        self._lock: JournalLock | None = None
        if work_dir is not None:
            path = Path(work_dir) / _JOURNAL
            self._lock = JournalLock(path.with_suffix(".lock"))
            try:
                self._journal = Journal(path)
                for message in self._journal.messages:
                    self._apply(message)
                self._journal.replace(self._live_messages(self._journal.messages))
                self._journal.messages.clear()
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Closes the journal."""
        if self._journal is not None:
            self._journal.close()
        if self._lock is not None:
            self._lock.close()

    def add_dataset(
        self,
        dataset_id: str | None,
        facts: SourceFacts,
        pickled: np.ndarray,
        *,
        compression: str | None = AUTO,
    ) -> str:
        """Registers a dataset, and returns its id; without one, it is a hash of the contents.

        Raises ValueError if the id belongs to a dataset of another kind.
        """
        if dataset_id is None:
            kind = b"" if compression == AUTO else repr(compression).encode()
            dataset_id = hashlib.sha256(pickled.tobytes() + kind).hexdigest()[:32]
        known = self.datasets.get(dataset_id)
        if known is None:
            fields = {
                "dataset_id": dataset_id,
                "facts": dataclasses.asdict(facts),
                "compression": compression,
            }
            self._record(Message("dataset", fields, [pickled.copy()]))
        elif (known.facts, known.compression) != (facts, compression):
            raise ValueError(
                explain(
                    f"dataset_id={dataset_id!r} is registered, with {known.facts} and "
                    f"compression={known.compression!r}; the new dataset has {facts} and "
                    f"compression={compression!r}.",
                    expected="one dataset for an id.",
                    fix="use another dataset_id.",
                )
            )
        return dataset_id

    def begin(self, spec: RunSpec) -> JobRun:
        """Begins a run."""
        self._record(Message("run", {"spec": dataclasses.asdict(spec)}))
        return self.runs[spec.run]

    def change(self, run: str, records: list[Record]) -> None:
        """Carries out records of a run."""
        for record in records:
            self._record(Message("change", {"run": run, "record": record}))

    def end(self, run: str, reason: str) -> None:
        """Ends a run, and forgets it."""
        self._record(Message("end", {"run": run, "reason": reason}))

    def _record(self, message: Message) -> None:
        if self._journal is not None:
            self._journal.append(message)
        self._apply(message)

    def _apply(self, message: Message) -> None:
        fields = message.fields
        if message.kind == "dataset":
            dataset = RegisteredDataset(
                fields["dataset_id"],
                SourceFacts(**fields["facts"]),
                np.array(message.arrays[0]),
                fields["compression"],
            )
            self.datasets[dataset.dataset_id] = dataset
        elif message.kind == "run":
            spec = RunSpec.from_json(fields["spec"])
            self.runs[spec.run] = JobRun(spec, spec.make_job())
        elif message.kind == "change":
            if fields["run"] in self.runs:
                self.runs[fields["run"]].job.apply(fields["record"])
        else:
            self.runs.pop(fields["run"], None)
            self.ended[fields["run"]] = fields["reason"]

    def _live_messages(self, messages: Any) -> Iterator[Message]:
        """Yields the messages of the journal without those of ended runs."""
        is_live: dict[str, Callable[[dict[str, Any]], bool]] = {
            "dataset": lambda fields: True,
            "run": lambda fields: fields["spec"]["run"] in self.runs,
            "change": lambda fields: fields["run"] in self.runs,
            "end": lambda fields: False,
        }
        for message in messages:
            if is_live[message.kind](message.fields):
                yield message
