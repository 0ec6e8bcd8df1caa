"""All jobs of the campaign."""

from __future__ import annotations

from tests.chaos.jobs import Job
from tests.chaos.jobs.elastic import Elastic
from tests.chaos.jobs.lockstep import Lockstep

__all__ = ["JOBS"]

JOBS: tuple[Job, ...] = (Lockstep(), Elastic())
