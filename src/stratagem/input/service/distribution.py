"""`distribute`, `register_dataset`, and `from_dataset_id`: datasets that workers read."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from stratagem.cluster.addresses import split_address, without_scheme
from stratagem.environment import load
from stratagem.errors import check_number, explain, invalid
from stratagem.group.current import current_group
from stratagem.input.batch_messages import AUTO, checked_compression
from stratagem.input.dataset import Dataset
from stratagem.input.service.address_book import BookClient
from stratagem.input.service.splits import (
    ShardingPolicy,
    SourceFacts,
    checked_policy,
    facts_of,
    require_repeatable,
)
from stratagem.input.service.trainer import EpochReading, ReadRequest, SentDataset
from stratagem.input.sources.adapters import as_source
from stratagem.input.sources.source import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Reader,
    Source,
    require_shards,
)
from stratagem.options import AutoShardPolicy


def _checked(
    processing_mode: object,
    job_name: str | None,
    consumer_index: int | None,
    num_consumers: int | None,
    most_ahead: int | None,
    is_exact: bool,
    skip_errors: int,
) -> ReadRequest:
    """Returns the request of these options; raises ValueError if they do not fit."""
    policy = checked_policy(processing_mode)
    in_rounds = job_name is not None and num_consumers is not None
    if job_name is not None and consumer_index is num_consumers is None:
        group = current_group()
        if group is None:
            raise invalid(
                f"distribute received job_name={job_name!r} without the index of this "
                "consumer, in a process that belongs to no group.",
                expected="which of how many consumers this process is: each reads a share "
                "that follows from these numbers.",
                fix="pass consumer_index and num_consumers in place of job_name.",
            )
        consumer_index, num_consumers = group.identity.process_id, group.identity.num_processes
    if (consumer_index is None) != (num_consumers is None) or not (
        0 <= (consumer_index or 0) < (1 if num_consumers is None else num_consumers)
    ):
        raise invalid(
            f"distribute received consumer_index={consumer_index} and "
            f"num_consumers={num_consumers}.",
            expected="both or none of them, and 0 <= consumer_index < num_consumers.",
            fix="pass the index of this process among the consumers, and their number.",
        )
    check_number("distribute", or_none=True, max_outstanding_requests=most_ahead)
    if is_exact and policy is ShardingPolicy.OFF and not in_rounds:
        raise invalid(
            "exactly_once=True was passed with ShardingPolicy.OFF, with which each worker "
            "reads all data.",
            expected="a policy that divides the data.",
            fix='pass "distributed_epoch" (DYNAMIC).',
        )
    check_number("distribute", 0, skip_errors=skip_errors)
    if skip_errors and in_rounds:
        raise invalid(
            f"skip_errors={skip_errors} was passed with num_consumers={num_consumers}.",
            expected="0 in coordinated reads: consumers would lose step.",
            fix="omit skip_errors or num_consumers.",
        )
    index, count = consumer_index or 0, num_consumers or 1
    return ReadRequest(policy, index, count, in_rounds, most_ahead, is_exact, skip_errors)


def _pickled(source: Source) -> np.ndarray:
    cloudpickle: Any = load("cloudpickle", needed_by="the input service", install="stratagem[ray]")
    try:
        return np.frombuffer(cloudpickle.dumps(source), np.uint8)
    except Exception as error:
        raise TypeError(
            explain(
                f"The dataset cannot be sent to input workers: {error}",
                expected="a dataset that can be pickled: arrays, files, Grain, Hugging Face, or a "
                "function.",
                fix="make it in a function: sg.input.Dataset.from_generator(function).",
            )
        ) from error


class ServiceSource(Source):
    """A dataset that input workers read.

    `source` is the dataset, None if another process registered it under `dataset_id`. `spec` is
    then the spec of its batches, or None to read one.
    """

    def __init__(
        self,
        service: str,
        wanted: ReadRequest,
        source: Source | None,
        *,
        dataset_id: str = "",
        spec: Any = None,
        compression: str | None = AUTO,
    ) -> None:
        split_address(without_scheme(service))
        self._service, self._wanted, self._source = service, wanted, source
        self._dataset_id, self._spec = dataset_id, spec
        self._dataset: SentDataset | None = None
        self._known: dict[str, Any] = {}
        if source is not None:
            facts = facts_of(source)
            _check(facts, wanted)
            self._dataset = SentDataset.named(_pickled(source), facts, compression)

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """OFF: each process gets batches of its own."""
        return AutoShardPolicy.OFF

    @property
    def cardinality(self) -> int:
        """Number of batches if one consumer gets all of them exactly once, else unknown."""
        if self._source is None:
            return UNKNOWN_CARDINALITY
        count = self._source.cardinality
        is_whole = self._wanted.count == 1 and self._wanted.is_exact
        is_known = is_whole and facts_of(self._source).num_files is None
        return count if is_known or count == INFINITE_CARDINALITY else UNKNOWN_CARDINALITY

    def element_spec(self) -> Any:
        """Returns the `ArraySpec`s of a batch; may read one."""
        if self._spec is None and self._source is not None:
            self._spec = self._source.element_spec()
        if self._spec is None:
            alone = dataclasses.replace(self._wanted, index=0, count=1, in_rounds=False)
            whole = ServiceSource(self._service, alone, None, dataset_id=self._dataset_id)
            self._spec = super(ServiceSource, whole).element_spec()
        return self._spec

    def open(self, epoch: int) -> Reader:
        """Opens an epoch; looks for workers at the first batch."""
        return ServiceReader(functools.partial(self._begin, epoch))

    def _begin(self, epoch: int, state: dict[str, Any] | None) -> EpochReading:
        if self._dataset is None:
            with BookClient(self._service) as book:
                answer = book.ask("dataset", dataset_id=self._dataset_id)
            facts, compression = answer.fields["facts"], answer.fields["compression"]
            pickled = np.array(answer.arrays[0])  # not of the connection's memory
            self._dataset = SentDataset.named(pickled, SourceFacts(**facts), compression)
            _check(self._dataset.facts, self._wanted)
        return EpochReading(self._service, self._dataset, self._wanted, epoch, state, self._known)


def _check(facts: SourceFacts, wanted: ReadRequest) -> None:
    """Raises ValueError if a dataset cannot be read as asked for."""
    if wanted.policy is ShardingPolicy.HINT:
        require_shards(wanted.policy, None, num_files=None, has_shard_hint=facts.has_shard_hint)
    if wanted.is_exact:
        require_repeatable(facts)


class ServiceReader(Reader):
    """Reads one epoch. `begin` opens it, from a state or None."""

    def __init__(self, begin: Callable[[dict[str, Any] | None], EpochReading]) -> None:
        self._begin = begin
        self._state: dict[str, Any] | None = None
        self._epoch: EpochReading | None = None
        self._finalizer: Any = None

    def read(self) -> Any:
        """Returns the next batch in the order of the epoch."""
        if self._epoch is None:
            self._epoch = self._begin(self._state)
            # The threads do not refer to this reader, so that it can be collected.
            self._finalizer = weakref.finalize(self, self._epoch.close)
        try:
            return self._epoch.next()
        except StopIteration:
            self.close()
            raise

    def state(self) -> Any:
        """Returns the position as JSON; None before the first batch."""
        return self._state if self._epoch is None else self._epoch.state()

    def restore(self, state: dict[str, Any] | None) -> None:
        """Resumes from a state: batches that were returned do not come again."""
        self.close()
        self._state, self._epoch = state, None

    def close(self) -> None:
        """Closes the connections."""
        if self._finalizer is not None:
            self._finalizer()


def distribute(
    processing_mode: ShardingPolicy | str,
    service: str,
    job_name: str | None = None,
    consumer_index: int | None = None,
    num_consumers: int | None = None,
    max_outstanding_requests: int | None = None,
    *,
    compression: str | None = "AUTO",
    exactly_once: bool = False,
    skip_errors: int = 0,
) -> Callable[[Any], Dataset]:
    """Returns a function that moves the reading of a dataset to input workers.

    Each batch is visited at most once, but with OFF once per worker. The order is the same each
    time that as many workers are there.

    Args:
        processing_mode: a `ShardingPolicy`, "parallel_epochs" (OFF) or "distributed_epoch".
        service: address of the dispatcher, its `target`.
        job_name: with the next two, coordinated reads: in each step, consumers get batches that
            follow each other. Alone, the processes of a multi-worker strategy divide each epoch.
        consumer_index: index of this consumer, from 0.
        num_consumers: number of consumers that divide each epoch.
        max_outstanding_requests: number of batches fetched ahead; None for 2 per worker.
        compression: "zstd", None, or "AUTO" for zstd between machines if zstandard is installed.
        exactly_once: raises ValueError for data that cannot be visited exactly once.
        skip_errors: number of batches of an epoch that may fail, and are skipped with a warning.

    Returns:
        A function for `Dataset.apply`, of any dataset that `distribute_dataset` takes.

    Raises:
        ImportError: compression="zstd" without zstandard.
        ValueError: an unknown mode or address, or options that do not fit.

    Example:
        >>> svc = sg.input.service
        >>> with svc.DispatchServer() as d, svc.WorkerServer(svc.WorkerConfig(d.target)):
        ...     distribute = svc.distribute("distributed_epoch", d.target)
        ...     dataset = sg.input.Dataset(np.arange(6), batch_size=2).apply(distribute)
        ...     print([batch.tolist() for batch in dataset])
        [[0, 1], [2, 3], [4, 5]]

    Source: TF 2.21 data_service_ops.py, distribute.
    """
    consumer = job_name, consumer_index, num_consumers
    options = max_outstanding_requests, exactly_once, skip_errors
    wanted = _checked(processing_mode, *consumer, *options)
    checked = checked_compression(compression)

    def distributed(dataset: Any) -> Dataset:
        return Dataset(ServiceSource(service, wanted, as_source(dataset), compression=checked))

    return distributed


def register_dataset(
    service: str,
    dataset: Any,
    compression: str | None = "AUTO",
    dataset_id: str | None = None,
) -> str:
    """Registers a dataset at a dispatcher, for `from_dataset_id` in any process.

    Args:
        service: address of the dispatcher.
        dataset: any dataset that `distribute_dataset` takes and that can be pickled.
        compression: as in `distribute`.
        dataset_id: id of the dataset; None makes one of its contents. A known id is not changed.

    Returns:
        The id.

    Raises:
        ImportError: zstandard is not installed, and compression="zstd".
        TypeError: the dataset cannot be pickled.
        ValueError: the id belongs to a dataset of another kind.

    Example:
        >>> dispatcher = sg.input.service.DispatchServer()
        >>> dataset = sg.input.Dataset(np.arange(4), batch_size=2)
        >>> sg.input.service.register_dataset(dispatcher.target, dataset, dataset_id="numbers")
        'numbers'
        >>> dispatcher.stop()

    Source: TF 2.21 data_service_ops.py, register_dataset.
    """
    source, checked = as_source(dataset), checked_compression(compression)
    pickled, facts = _pickled(source), dataclasses.asdict(facts_of(source))
    with BookClient(service) as book:
        answer = book.ask(
            "register", (pickled,), dataset_id=dataset_id, compression=checked, facts=facts
        )
    return answer.fields["dataset_id"]


def from_dataset_id(
    processing_mode: ShardingPolicy | str,
    service: str,
    dataset_id: str,
    element_spec: Any = None,
    job_name: str | None = None,
    consumer_index: int | None = None,
    num_consumers: int | None = None,
    max_outstanding_requests: int | None = None,
    *,
    exactly_once: bool = False,
    skip_errors: int = 0,
) -> Dataset:
    """Returns a registered dataset that input workers read.

    Args:
        processing_mode: as in `distribute`, and so are the others.
        service: address of the dispatcher.
        dataset_id: returned by `register_dataset`.
        element_spec: `ArraySpec`s of a batch; None reads one when they are needed.
        job_name: as in `distribute`.
        consumer_index: as in `distribute`.
        num_consumers: as in `distribute`.
        max_outstanding_requests: as in `distribute`.
        exactly_once: as in `distribute`; checked at the first batch.
        skip_errors: as in `distribute`.

    Returns:
        The dataset. Its first batch raises NotFoundError for an unknown id.

    Raises:
        ValueError: as `distribute`.

    Example:
        >>> svc = sg.input.service
        >>> with svc.DispatchServer() as d, svc.WorkerServer(svc.WorkerConfig(d.target)):
        ...     name = svc.register_dataset(d.target, sg.input.Dataset(np.arange(4), batch_size=2))
        ...     dataset = svc.from_dataset_id("distributed_epoch", d.target, name)
        ...     print([batch.tolist() for batch in dataset])
        [[0, 1], [2, 3]]

    Source: TF 2.21 data_service_ops.py, from_dataset_id.
    """
    consumer = job_name, consumer_index, num_consumers
    options = max_outstanding_requests, exactly_once, skip_errors
    wanted = _checked(processing_mode, *consumer, *options)
    return Dataset(ServiceSource(service, wanted, None, dataset_id=dataset_id, spec=element_spec))
