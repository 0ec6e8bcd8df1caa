"""The multi-node flow of TensorFlow 1.11: a Keras model as an Estimator, on several processes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from stratagem.estimator.steps import read_variable
from tests.multiprocess.programs import estimated
from tests.multiprocess.test_estimator_client import told_by_laptop
from tests.multiprocess.test_estimator_cluster import (
    check_evaluations,
    metrics_of,
    one_device,
    tasks,
)

pytestmark = pytest.mark.slow

_PROGRAM = "keras_estimated.py"
_NUM_STEPS = 45

_LAPTOP = """
import json, sys
from pathlib import Path
import stratagem as sg
from tests.multiprocess.programs import estimated, keras_estimated

folder, cluster = Path(sys.argv[1]), json.loads(sys.argv[2])
both = sg.estimator.DistributeConfig(train_distribute=STRATEGY, remote_cluster=cluster)
config = sg.estimator.RunConfig(
    experimental_distribute=both, save_checkpoints_steps=20, keep_checkpoint_max=None
)
model = keras_estimated.compiled_model()
metrics, _ = sg.estimator.train_and_evaluate(
    sg.estimator.model_to_estimator(model, model_dir=folder / "model", config=config),
    sg.estimator.TrainSpec(estimated.train_fn, max_steps=NUM_STEPS),
    sg.estimator.EvalSpec(estimated.eval_fn, steps=None, start_delay_secs=0, throttle_secs=0),
)
print(json.dumps({name: float(value) for name, value in metrics.items()}))
"""


def check_weights(checkpoint: Path, num_steps: int, global_batch_size: int) -> None:
    for name, value in one_device(num_steps, global_batch_size).items():
        found = read_variable(str(checkpoint), name)
        np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-5, err_msg=name)


def test_collective_all_reduce(tmp_path: Path) -> None:
    jobs = {"worker": 2, "evaluator": 1}
    with tasks(jobs, tmp_path, _NUM_STEPS, "CollectiveAllReduceStrategy", _PROGRAM) as made:
        made.wait()
    check_weights(tmp_path / f"model/model.ckpt-{_NUM_STEPS}", _NUM_STEPS, 2 * estimated.BATCH_SIZE)
    check_evaluations(tmp_path, [_NUM_STEPS])


def test_parameter_servers(tmp_path: Path) -> None:
    num_steps = 300
    jobs = {"chief": 1, "worker": 1, "ps": 2, "evaluator": 1}
    with tasks(jobs, tmp_path, num_steps, "ParameterServerStrategy", _PROGRAM) as made:
        made.wait()
    check_evaluations(tmp_path, range(num_steps, num_steps + 2))
    told = json.loads((tmp_path / "evaluator-0.json").read_text())
    assert told["accuracy"] > 0.7


@pytest.mark.parametrize(
    "strategy", ["sg.CollectiveAllReduceStrategy()", "sg.ParameterServerStrategy"]
)
def test_remote_cluster(strategy: str, tmp_path: Path) -> None:
    laptop = _LAPTOP.replace("STRATEGY", strategy).replace("NUM_STEPS", str(_NUM_STEPS))
    lockstep = "Collective" in strategy
    jobs = {"worker": 2, "evaluator": 1} if lockstep else {"chief": 1, "worker": 2, "ps": 1}
    told = told_by_laptop(laptop, jobs, tmp_path)
    checkpoint = tmp_path / f"model/model.ckpt-{_NUM_STEPS}"
    assert told == pytest.approx(metrics_of(checkpoint), rel=1e-5)
    assert told["global_step"] == _NUM_STEPS
    if lockstep:
        check_weights(checkpoint, _NUM_STEPS, 2 * estimated.BATCH_SIZE)
