"""RunConfig follows TensorFlow's defaults, rules and reading of TF_CONFIG."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from stratagem.estimator.run_config import RunConfig


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)


def test_arguments_come_in_tensorflows_order() -> None:
    names = """model_dir tf_random_seed save_summary_steps save_checkpoints_steps
        save_checkpoints_secs session_config keep_checkpoint_max keep_checkpoint_every_n_hours
        log_step_count_steps train_distribute device_fn protocol eval_distribute
        experimental_distribute experimental_max_worker_delay_secs session_creation_timeout_secs
        checkpoint_save_graph_def"""
    assert list(inspect.signature(RunConfig).parameters) == names.split()


def test_defaults_are_tensorflows() -> None:
    config = RunConfig()
    assert config.model_dir is None
    assert config.tf_random_seed is None
    assert (config.save_summary_steps, config.log_step_count_steps) == (100, 100)
    assert (config.save_checkpoints_steps, config.save_checkpoints_secs) == (None, 600)
    assert (config.keep_checkpoint_max, config.keep_checkpoint_every_n_hours) == (5, 10000)
    assert config.session_creation_timeout_secs == 7200
    assert (config.train_distribute, config.eval_distribute) == (None, None)


def test_process_by_itself_is_worker_0_and_chief() -> None:
    config = RunConfig()
    assert not config.cluster_spec
    assert (config.task_type, config.task_id, config.global_id_in_cluster) == ("worker", 0, 0)
    assert (config.is_chief, config.master, config.evaluation_master) == (True, "", "")
    assert (config.num_ps_replicas, config.num_worker_replicas) == (0, 1)
    assert config.service is None


@pytest.mark.parametrize(
    ("given", "steps", "secs"),
    [
        ({"save_checkpoints_steps": 5}, 5, None),
        ({"save_checkpoints_secs": 7}, None, 7),
        ({"save_checkpoints_steps": None}, None, None),
        ({"save_checkpoints_secs": None}, None, None),
        ({"save_checkpoints_steps": None, "save_checkpoints_secs": None}, None, None),
        ({"save_checkpoints_steps": 5, "save_checkpoints_secs": None}, 5, None),
    ],
)
def test_saves_by_steps_or_by_seconds(given, steps, secs) -> None:
    config = RunConfig(**given)
    assert (config.save_checkpoints_steps, config.save_checkpoints_secs) == (steps, secs)


def test_saving_by_both_is_an_error() -> None:
    words = "save_checkpoints_steps=5 and save_checkpoints_secs=7 are both set"
    with pytest.raises(ValueError, match=words):
        RunConfig(save_checkpoints_steps=5, save_checkpoints_secs=7)
    with pytest.raises(ValueError, match=words):
        RunConfig().replace(save_checkpoints_steps=5, save_checkpoints_secs=7)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("save_summary_steps", -1),
        ("save_checkpoints_steps", -1),
        ("save_checkpoints_secs", -0.5),
        ("keep_checkpoint_max", -1),
        ("keep_checkpoint_every_n_hours", 0),
        ("log_step_count_steps", 0),
        ("experimental_max_worker_delay_secs", -1),
        ("session_creation_timeout_secs", 0),
    ],
)
def test_number_out_of_range_is_an_error(name, value) -> None:
    with pytest.raises(ValueError, match=f"{name}={value} is out of range"):
        RunConfig(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("tf_random_seed", 1.5), ("save_summary_steps", "1"), ("keep_checkpoint_max", True)],
)
def test_number_of_another_type_is_an_error(name, value) -> None:
    with pytest.raises(TypeError, match=rf"{name}=.* is of type"):
        RunConfig(**{name: value})


def test_numbers_that_mean_never_are_taken() -> None:
    config = RunConfig(None, np.int64(-3), 0, 0, keep_checkpoint_max=0, log_step_count_steps=None)
    assert (config.tf_random_seed, config.save_summary_steps) == (-3, 0)


def test_device_function_is_an_error_that_names_the_strategy() -> None:
    with pytest.raises(ValueError, match=r"device_fn=.* is not supported"):
        RunConfig(device_fn=lambda op: "cpu")


def test_protocol_is_checked_and_session_config_kept() -> None:
    assert RunConfig(protocol="grpc", session_config={"a": 1}).session_config == {"a": 1}
    with pytest.raises(ValueError, match="protocol='http' is unknown"):
        RunConfig(protocol="http")


def test_replace_changes_only_what_is_named() -> None:
    config = RunConfig("a", 3, save_checkpoints_secs=60)
    other = config.replace(model_dir="b", save_checkpoints_steps=10)
    assert (other.model_dir, other.tf_random_seed) == ("b", 3)
    assert (other.save_checkpoints_steps, other.save_checkpoints_secs) == (10, None)
    assert (config.model_dir, config.save_checkpoints_secs) == ("a", 60)
    back = other.replace(save_checkpoints_secs=5)
    assert (back.save_checkpoints_steps, back.save_checkpoints_secs) == (None, 5)


def test_replacing_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no settings \['num_gpus', 'task_type'\]"):
        RunConfig().replace(task_type="ps", num_gpus=1, model_dir="a")
