"""Description of a dispatcher's workers and jobs."""

from __future__ import annotations

import numpy as np
import pytest

import stratagem as sg
from stratagem.input.service.dispatching import describe
from stratagem.input.service.job_starts import Members


def test_nothing_is_described_without_workers_and_jobs() -> None:
    assert describe(Members(None), []) == {"workers": {}, "jobs": []}


@pytest.mark.slow
def test_workers_and_jobs_are_described_while_one_reads() -> None:
    with sg.input.service.start(1) as service:
        distribute = sg.input.service.distribute("distributed_epoch", service.target)
        dataset = sg.input.Dataset(np.arange(6), batch_size=2).apply(distribute)
        batches = iter(dataset)
        next(batches)
        (job,) = service.describe()["jobs"]
        assert (job["policy"], job["num_consumers"], job["is_finished"]) == ("DYNAMIC", 1, False)
        assert len([*batches]) == 2
        (worker,) = service.describe()["workers"].values()
        assert worker.keys() == {"tags", "num_read", "read_s"}
