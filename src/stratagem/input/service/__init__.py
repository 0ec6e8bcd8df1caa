"""Input service: datasets read by workers apart from trainers, as in tf.data service."""

from stratagem.input.service.dispatcher import DispatcherConfig, DispatchServer
from stratagem.input.service.distribution import distribute, from_dataset_id, register_dataset
from stratagem.input.service.sharding import ShardingPolicy
from stratagem.input.service.shared_window import CrossTrainerCache
from stratagem.input.service.snapshot import save
from stratagem.input.service.starting import InputService, start
from stratagem.input.service.worker import WorkerConfig, WorkerServer

__all__ = [
    "CrossTrainerCache",
    "DispatchServer",
    "DispatcherConfig",
    "InputService",
    "ShardingPolicy",
    "WorkerConfig",
    "WorkerServer",
    "distribute",
    "from_dataset_id",
    "register_dataset",
    "save",
    "start",
]
