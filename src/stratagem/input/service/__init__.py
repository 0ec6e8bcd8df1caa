"""Input service: datasets read by workers apart from trainers, as in tf.data service."""

from stratagem.input.service.dispatcher import DispatcherConfig, DispatchServer
from stratagem.input.service.distribution import distribute, from_dataset_id, register_dataset
from stratagem.input.service.job_requests import CrossTrainerCache
from stratagem.input.service.processes import WorkerConfig, WorkerServer
from stratagem.input.service.snapshot import save
from stratagem.input.service.splits import ShardingPolicy
from stratagem.input.service.starting import InputService, start

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
