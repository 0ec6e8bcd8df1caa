"""Preemption notices: sources in this process, and what to do after one. Loads no JAX."""

from stratagem.cluster.preemption.configuration import (
    EXIT_CODE,
    GOOGLE_CLOUD_EXIT_CODE,
    GoogleCloudSource,
    PolledSource,
    PreemptionWatcher,
    TerminationConfig,
    name_of_environment,
    on_google_cloud,
    pod_time_left,
    slurm_time_left,
)
from stratagem.cluster.preemption.notices import AnySource, Notice, NoticeSource
from stratagem.cluster.preemption.signals import SignalSource

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
