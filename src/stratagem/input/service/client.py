"""`ServiceSource`: a dataset that input workers read; `ServiceReader` reads one epoch of a job."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from typing import Any

import numpy as np

from stratagem.errors import NotFoundError
from stratagem.input.batch_compression import AUTO
from stratagem.input.service.consumer import JobConsumer
from stratagem.input.service.fetching import FreeFetching, RoundFetching
from stratagem.input.service.job_requests import JobRequest
from stratagem.input.service.service_client import ServiceClient
from stratagem.input.service.sharding import ShardingPolicy
from stratagem.input.service.splits import (
    facts_of,
    require_endless,
    require_hint,
    require_repeatable,
)
from stratagem.input.sources.source import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Reader, Source
from stratagem.messages import explain
from stratagem.optional_libraries import load
from stratagem.options import AutoShardPolicy


def register_source(
    service: str, source: Source, dataset_id: str | None, compression: str | None
) -> str:
    """Registers a source at a dispatcher, and returns its id.

    Raises TypeError if it cannot be pickled.
    """
    cloudpickle: Any = load("cloudpickle", needed_by="the input service", install="stratagem[ray]")
    try:
        pickled = cloudpickle.dumps(source)
    except Exception as error:
        raise TypeError(
            explain(
                f"The dataset cannot be sent to input workers: {error}",
                expected="a dataset that can be pickled: arrays, files, Grain, Hugging Face, or a "
                "function.",
                fix="make it in a function: sg.input.Dataset.from_generator(function).",
            )
        ) from error
    with ServiceClient(service) as client:
        answer = client.ask(
            "register",
            (np.frombuffer(pickled, np.uint8),),
            dataset_id=dataset_id,
            compression=compression,
            facts=dataclasses.asdict(facts_of(source)),
        )
    return answer.fields["dataset_id"]


class ServiceSource(Source):
    """A dataset that input workers read.

    `source` is the dataset, None if another process registered it. `spec` is then the spec of its
    batches, or None to read one.
    """

    def __init__(
        self,
        service: str,
        wanted: JobRequest,
        source: Source | None,
        spec: Any = None,
        *,
        compression: str | None = AUTO,
    ) -> None:
        self._compression = compression
        self._service = service
        self._wanted = wanted
        self._source = source
        self._spec = spec
        if source is not None:
            _check(source, wanted)

    def register(self) -> None:
        """Registers the dataset at the dispatcher."""
        assert self._source is not None
        dataset_id = register_source(
            self._service, self._source, self._wanted.dataset_id or None, self._compression
        )
        self._wanted = dataclasses.replace(self._wanted, dataset_id=dataset_id)

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
        is_whole = self._wanted.job is None and self._wanted.is_exact
        is_known = is_whole and facts_of(self._source).num_files is None
        return count if is_known or count == INFINITE_CARDINALITY else UNKNOWN_CARDINALITY

    def element_spec(self) -> Any:
        """Returns the `ArraySpec`s of a batch; may read one."""
        if self._spec is None and self._source is not None:
            self._spec = self._source.element_spec()
        if self._spec is None:
            alone = dataclasses.replace(
                self._wanted, job=None, consumer_index=None, num_consumers=None
            )
            self._spec = super(
                ServiceSource, ServiceSource(self._service, alone, None)
            ).element_spec()
        return self._spec

    def open(self, epoch: int) -> Reader:
        """Opens an epoch; joins the job at the first batch."""
        return ServiceReader(functools.partial(self._join, epoch))

    def _join(self, epoch: int, state: dict[str, Any] | None) -> JobConsumer:
        client = ServiceClient(self._service)
        try:
            try:
                return JobConsumer(client, self._wanted, epoch, state)
            except NotFoundError:
                if self._source is None:
                    raise
                # The dispatcher was started again without a journal.
                self.register()
                return JobConsumer(client, self._wanted, epoch, state)
        except BaseException:
            client.close()
            raise


class ServiceReader(Reader):
    """Reads one epoch of a job. `join` begins it, from a state or None."""

    def __init__(self, join: Any) -> None:
        self._join = join
        self._state: dict[str, Any] | None = None
        self._consumer: JobConsumer | None = None
        self._finalizer: Any = None

    def read(self) -> Any:
        """Returns the next batch that a worker has ready."""
        if self._consumer is None:
            self._consumer = self._begin()
        try:
            return self._consumer.next()
        except StopIteration:
            self.close()
            raise

    @property
    def identity(self) -> tuple[int, int]:
        """Split of the last batch that was returned, and its index there."""
        assert self._consumer is not None
        assert self._consumer.returned is not None
        split, index = self._consumer.returned
        assert index is not None
        return split, index

    def _begin(self) -> JobConsumer:
        consumer: JobConsumer = self._join(self._state)
        is_coordinated = consumer.wanted.num_consumers is not None
        fetching = (RoundFetching if is_coordinated else FreeFetching)(consumer)
        # The threads do not refer to this reader, so that it can be collected.
        self._finalizer = weakref.finalize(self, _close, consumer, fetching)
        consumer.start(fetching.follow)
        return consumer

    def state(self) -> Any:
        """Returns the batches that were returned, as JSON."""
        return self._state if self._consumer is None else self._consumer.state()

    def restore(self, state: dict[str, Any] | None) -> None:
        """Resumes from a state: batches that were returned do not come again."""
        self.close()
        self._state, self._consumer = state, None

    def close(self) -> None:
        """Leaves the job."""
        if self._finalizer is not None:
            self._finalizer()


def _close(consumer: JobConsumer, fetching: FreeFetching | RoundFetching) -> None:
    consumer.close()
    fetching.close()


def _check(source: Source, wanted: JobRequest) -> None:
    """Raises ValueError if a dataset cannot be read as asked for."""
    facts = facts_of(source)
    if wanted.policy == ShardingPolicy.HINT:
        require_hint(facts)
    if wanted.is_exact:
        require_repeatable(facts)
    if wanted.trainer is not None:
        require_endless(facts)
