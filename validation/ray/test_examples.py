"""The examples of the page about Ray print what they promise."""

from __future__ import annotations

import re

from tests.examples.programs import EXAMPLES, assert_same, promised

_FOLDER = EXAMPLES / "ray"


def test_strategy_trains_inside_ray_train(run) -> None:
    """Two workers with two devices each, from which Ray takes metrics and the checkpoint."""
    printed = run(str(_FOLDER / "train.py"))
    # Ray may print lines of workers after it.
    (line,) = (one for one in printed.splitlines() if one.startswith("Accuracy"))
    assert_same(line, promised(_FOLDER / "train.py"))
    assert "4 replicas" in printed


def test_trials_of_ray_tune_each_have_a_strategy(run) -> None:
    printed = run(str(_FOLDER / "tune.py"))
    assert promised(_FOLDER / "tune.py") in printed.splitlines()


def test_ray_job_starts_parameter_servers(run) -> None:
    """`ray job submit` sends the folder and the entrypoint, as the submitter of a RayJob does."""
    job = ("--working-dir", str(_FOLDER), "--", "python", "parameter_servers.py")
    printed = run("-m", "ray.scripts.scripts", "job", "submit", *job)
    assert promised(_FOLDER / "parameter_servers.py") in printed
    assert re.search(r"Job 'raysubmit_\w+' succeeded", printed)
