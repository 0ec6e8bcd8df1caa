"""A laptop's program trains Estimators on servers that run already, one model after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stratagem.cluster.addresses import free_ports
from tests.multiprocess.cluster import addresses
from tests.multiprocess.test_estimator_cluster import metrics_of
from tests.unit.launch.remote.living import descendants, wait_for_end

_ROOT = Path(__file__).parents[2]
_LIMIT_S = 300
_SERVER = "from stratagem.cli import main; main()"

_LAPTOP = """
import json, sys
from pathlib import Path
import keras
import stratagem as sg
from tests.multiprocess.programs import estimated

folder, cluster = Path(sys.argv[1]), json.loads(sys.argv[2])

def wider_model_fn(features, labels, mode, params):
    features = keras.layers.Dense(params["units"], name="first")(features)
    return estimated.model_fn(features, labels, mode)

def trained(name, model_fn, params, max_steps):
    both = sg.estimator.DistributeConfig(
        train_distribute=sg.ParameterServerStrategy, remote_cluster=cluster
    )
    config = sg.estimator.RunConfig(experimental_distribute=both, save_checkpoints_steps=20)
    estimator = sg.estimator.Estimator(model_fn, folder / name, config, params)
    return sg.estimator.train_and_evaluate(
        estimator,
        sg.estimator.TrainSpec(estimated.train_fn, max_steps=max_steps),
        sg.estimator.EvalSpec(estimated.eval_fn, steps=None, throttle_secs=0),
    )[0]

found = [
    trained("one", estimated.model_fn, None, 30),
    trained("one", estimated.model_fn, None, 50),
    trained("two", wider_model_fn, {"units": 12}, 20),
]
print(json.dumps([{name: float(value) for name, value in one.items()} for one in found]))
"""


@contextmanager
def servers(cluster: dict[str, list[str]], variables: dict[str, str]) -> Iterator[None]:
    """`stratagem server` as each task."""
    before = descendants(os.getpid())
    tasks = [(job, index) for job, known in cluster.items() for index in range(len(known))]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _SERVER, "server"],
            env={
                **variables,
                "TF_CONFIG": json.dumps(
                    {"cluster": cluster, "task": {"type": job, "index": index}}
                ),
            },
        )
        for job, index in tasks
    ]
    try:
        yield
        assert [process.poll() for process in processes] == [None] * len(processes)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
    assert wait_for_end(descendants(os.getpid()) - before) == set()


def told_by_laptop(program: str, jobs: Mapping[str, int], folder: Path) -> Any:
    """What a program prints last, in JSON, which has the folder and a cluster of servers."""
    found = iter(addresses(sum(jobs.values())))
    cluster = {job: [next(found) for _ in range(count)] for job, count in jobs.items()}
    variables = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "KERAS_BACKEND": "jax",
        "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
        "STRATAGEM_JOBS_PORT": str(free_ports(1)[0]),
        "PYTHONPATH": f"{_ROOT / 'src'}:{_ROOT}",
    }
    with servers(cluster, variables):
        (folder / "laptop.py").write_text(program)
        ended = subprocess.run(
            [sys.executable, "laptop.py", folder, json.dumps(cluster)],
            cwd=folder,
            env=variables,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
        )
        assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.slow
def test_servers_train_one_model_after_the_other(tmp_path: Path) -> None:
    jobs = {"chief": 1, "worker": 2, "ps": 1}
    first, second, other = told_by_laptop(_LAPTOP, jobs, tmp_path)
    assert [one["global_step"] for one in (first, second, other)] == [30, 50, 20]
    assert second == pytest.approx(metrics_of(tmp_path / "one" / "model.ckpt-50"), rel=1e-5)
    assert first == pytest.approx(metrics_of(tmp_path / "one" / "model.ckpt-30"), rel=1e-5)
    assert second["loss"] < first["loss"]
