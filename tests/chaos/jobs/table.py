"""All jobs of the campaign."""

from __future__ import annotations

from tests.chaos.jobs import Job
from tests.chaos.jobs.elastic import Elastic
from tests.chaos.jobs.keyed_tables import KeyedTables
from tests.chaos.jobs.lockstep import Lockstep
from tests.chaos.jobs.parameter_servers import ParameterServers
from tests.chaos.jobs.remote_jobs import RemoteJobs

__all__ = ["JOBS"]

JOBS: tuple[Job, ...] = (
    Lockstep(),
    Elastic(),
    ParameterServers(),
    KeyedTables(),
    RemoteJobs(),
)
