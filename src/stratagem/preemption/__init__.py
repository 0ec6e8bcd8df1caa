"""Preemption notices: sources in this process, and what to do after one. Loads no JAX."""

from stratagem.preemption.configuration import (
    EXIT_CODE,
    GOOGLE_CLOUD_EXIT_CODE,
    TerminationConfig,
)
from stratagem.preemption.environments import (
    name_of_environment,
    pod_time_left,
    slurm_time_left,
)
from stratagem.preemption.google_cloud import GoogleCloudSource, on_google_cloud
from stratagem.preemption.notices import AnySource, Notice, NoticeSource
from stratagem.preemption.polling import PolledSource
from stratagem.preemption.signals import SignalSource
from stratagem.preemption.watcher import PreemptionWatcher

__all__ = [
    "AnySource",
    "EXIT_CODE",
    "GOOGLE_CLOUD_EXIT_CODE",
    "GoogleCloudSource",
    "Notice",
    "NoticeSource",
    "PolledSource",
    "PreemptionWatcher",
    "SignalSource",
    "TerminationConfig",
    "name_of_environment",
    "on_google_cloud",
    "pod_time_left",
    "slurm_time_left",
]
