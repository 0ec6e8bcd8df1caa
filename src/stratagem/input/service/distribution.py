"""`distribute`, `register_dataset` and `from_dataset_id`: datasets that input workers read."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from stratagem.input.batch_messages import checked_compression
from stratagem.input.dataset import Dataset
from stratagem.input.service.client import ServiceSource, register_source
from stratagem.input.service.job_requests import CrossTrainerCache, JobRequest
from stratagem.input.service.splits import ShardingPolicy
from stratagem.input.sources.adapters import as_source


def distribute(
    processing_mode: ShardingPolicy | str,
    service: str,
    job_name: str | None = None,
    consumer_index: int | None = None,
    num_consumers: int | None = None,
    max_outstanding_requests: int | None = None,
    *,
    compression: str | None = "AUTO",
    cross_trainer_cache: CrossTrainerCache | None = None,
    exactly_once: bool = False,
    skip_errors: int = 0,
) -> Callable[[Any], Dataset]:
    """Returns a function that moves the reading of a dataset to input workers.

    Each batch is visited at most once, but with OFF once per worker.

    Args:
        processing_mode: a `ShardingPolicy`, "parallel_epochs" (OFF) or "distributed_epoch".
        service: address of the dispatcher, its `target`.
        job_name: consumers with one name share each epoch, as processes of a strategy must.
        consumer_index: index of this consumer in coordinated reads, from 0.
        num_consumers: number of consumers in coordinated reads, served by one worker in a step.
        max_outstanding_requests: number of batches fetched ahead; None for 2 per worker.
        compression: "zstd", None, or "AUTO" for zstd between machines if zstandard is installed.
        cross_trainer_cache: makes trainers share a job without an end; each gets all batches.
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
    options = max_outstanding_requests, exactly_once, skip_errors, cross_trainer_cache
    wanted = JobRequest.checked(processing_mode, *consumer, *options)
    return functools.partial(_distributed, service, wanted, checked_compression(compression))


def _distributed(
    service: str, wanted: JobRequest, compression: str | None, dataset: Any
) -> Dataset:
    source = ServiceSource(service, wanted, as_source(dataset), compression=compression)
    source.register()
    return Dataset(source)


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
    checked = checked_compression(compression)
    return register_source(service, as_source(dataset), dataset_id, checked)


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
    cross_trainer_cache: CrossTrainerCache | None = None,
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
        cross_trainer_cache: as in `distribute`; checked when the job begins.
        exactly_once: the same.
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
    consumer = job_name, consumer_index, num_consumers, max_outstanding_requests
    options = exactly_once, skip_errors, cross_trainer_cache
    wanted = JobRequest.checked(processing_mode, *consumer, *options)
    wanted = dataclasses.replace(wanted, dataset_id=dataset_id)
    return Dataset(ServiceSource(service, wanted, None, element_spec))
