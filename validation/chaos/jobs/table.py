"""All jobs of the campaign."""

from __future__ import annotations

from validation.chaos.jobs import Job
from validation.chaos.jobs.elastic import Elastic
from validation.chaos.jobs.input_workers import InputWorkers
from validation.chaos.jobs.keyed_tables import KeyedTables
from validation.chaos.jobs.lockstep import Lockstep
from validation.chaos.jobs.parameter_servers import ParameterServers
from validation.chaos.jobs.remote_jobs import RemoteJobs

__all__ = ["JOBS"]

JOBS: tuple[Job, ...] = (
    Lockstep(),
    Elastic(),
    ParameterServers(),
    KeyedTables(),
    InputWorkers(),
    RemoteJobs(),
)
