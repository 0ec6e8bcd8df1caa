"""Input service: datasets read by workers apart from trainers, as in tf.data service."""

from stratagem.input.service.address_book import DispatcherConfig, DispatchServer
from stratagem.input.service.distribution import (
    distribute,
    from_dataset_id,
    register_dataset,
)
from stratagem.input.service.splits import ShardingPolicy
from stratagem.input.service.workers import InputService as InputService
from stratagem.input.service.workers import WorkerConfig, WorkerServer, start

__all__ = [
    "DispatchServer",
    "DispatcherConfig",
    "ShardingPolicy",
    "WorkerConfig",
    "WorkerServer",
    "distribute",
    "from_dataset_id",
    "register_dataset",
    "start",
]
