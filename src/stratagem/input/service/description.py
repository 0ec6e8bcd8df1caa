"""Workers and jobs of a dispatcher as JSON, for users and for scaling."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stratagem.input.service.members import Members
from stratagem.input.service.service_state import JobRun
from stratagem.input.service.sharding import ShardingPolicy


def describe(members: Members, runs: Iterable[JobRun]) -> dict[str, Any]:
    """Returns the workers by address, and the jobs.

    A worker has the number of batches that it has read and the seconds that this took. A consumer
    has the number of batches that it has taken, its age, and the seconds that it has waited.
    """
    return {
        "workers": {
            one.address: {"tags": one.tags, "num_read": one.num_read, "read_s": one.read_s}
            for one in members.workers.values()
        },
        "jobs": [_job(members, run) for run in runs],
    }


def _job(members: Members, run: JobRun) -> dict[str, Any]:
    spec, job = run.spec, run.job
    return {
        "job": spec.job if spec.is_named else None,
        "epoch": spec.epoch,
        "policy": ShardingPolicy(spec.policy).name,
        "num_consumers": len(job.consumers),
        "consumers": {
            consumer: load for (name, consumer), load in members.loads.items() if name == spec.run
        },
        "num_splits_done": len(job.done),
        "num_splits_lost": job.num_lost,
        "num_batches_skipped": len(job.skipped),
        "is_finished": job.is_finished,
    }
