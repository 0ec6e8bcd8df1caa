"""Termination configurations: defaults, presets of each environment, and user's choices."""

from __future__ import annotations

import signal
import time

import pytest

from stratagem.cli.manifests.kubernetes import kubernetes_template
from stratagem.cli.manifests.variable_rules import render_slurm, slurm_template
from stratagem.cluster.preemption.configuration import (
    EXIT_CODE,
    GoogleCloudSource,
    TerminationConfig,
)
from stratagem.cluster.preemption.notices import Notice
from stratagem.cluster.preemption.signals import SignalSource

GOOGLE = {"GCE_METADATA_HOST": "127.0.0.1:1"}


def code_of(config: TerminationConfig) -> object:
    with pytest.raises(SystemExit) as left:
        config.exit()
    return left.value.code


@pytest.mark.parametrize(
    ("variables", "code", "grace_s", "sources"),
    [
        ({}, 42, 0, [SignalSource]),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, 42, 0, [SignalSource]),
        ({"SLURM_JOB_ID": "7"}, 42, 0, [SignalSource]),
        (GOOGLE | {"CUDA_VISIBLE_DEVICES": "0"}, 143, 3600, [GoogleCloudSource, SignalSource]),
        (GOOGLE | {"CUDA_VISIBLE_DEVICES": ""}, 143, 0, [GoogleCloudSource, SignalSource]),
    ],
)
def test_environment_fills_in_missing_values(
    monkeypatch, variables, code, grace_s, sources
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    config = TerminationConfig().for_environment()
    assert code_of(config) == code
    assert config.grace_period == grace_s
    assert [type(source) for source in config.sources or ()] == sources
    assert config.termination_watcher_fn is None
    assert config.save_fn is None


@pytest.mark.parametrize("variables", [{}, {"SLURM_JOB_ID": "7"}, GOOGLE])
def test_chosen_values_are_kept(monkeypatch, variables) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)

    def leave() -> None:
        raise SystemExit(7)

    def save() -> None: ...

    given = TerminationConfig(lambda: True, leave, 5.0, save)
    config = given.for_environment()
    assert config == given
    assert code_of(config) == 7
    # The function alone is listened to, as in TensorFlow: SIGTERM ends the program as ever.
    with config.source() as source:
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        notice = source.wait(timeout_s=60)
    assert notice is not None
    assert notice.source == "termination_watcher_fn"


def test_grace_of_one_s_own_needs_no_count_of_gpus(monkeypatch) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    config = TerminationConfig(grace_period=60).for_environment()
    assert (config.grace_period, code_of(config)) == (60, 143)


def test_configuration_without_an_environment_exits_with_42() -> None:
    assert code_of(TerminationConfig()) == EXIT_CODE == 42


def test_templates_take_the_exit_code_for_saved() -> None:
    assert f"values: [{EXIT_CODE}]" in kubernetes_template()
    assert f'if [ "$status" -eq {EXIT_CODE} ]; then' in slurm_template()
    assert "#SBATCH --signal=TERM@" in render_slurm()


@pytest.mark.slow
def test_function_and_sources_are_listened_to_together() -> None:
    with TerminationConfig(lambda: False, sources=[SignalSource()]).source() as source:
        signal.raise_signal(signal.SIGTERM)
        notice = source.wait(timeout_s=60)
    assert notice is not None
    assert notice.source == "SIGTERM"


def test_interval_of_the_function_is_that_of_the_configuration() -> None:
    answers = [False, False, True]
    config = TerminationConfig(lambda: answers.pop(0), poll_interval_s=0.001)
    with config.source() as source:
        assert source.wait(timeout_s=60) is not None


def test_empty_list_of_sources_is_refused() -> None:
    with pytest.raises(ValueError, match="The list of notice sources is empty"):
        TerminationConfig(sources=()).source()


@pytest.mark.parametrize(
    ("preset", "signum", "grace_s"),
    [
        (lambda: TerminationConfig.kubernetes(), signal.SIGTERM, 30.0),
        (lambda: TerminationConfig.kubernetes(grace_s=120), signal.SIGTERM, 120.0),
        (lambda: TerminationConfig.slurm(), signal.SIGTERM, None),
        (lambda: TerminationConfig.slurm(["SIGTERM", "SIGUSR1"]), signal.SIGUSR1, None),
        (lambda: TerminationConfig(sources=[SignalSource("SIGUSR2")]), signal.SIGUSR2, None),
    ],
)
def test_signal_of_a_scheduler_is_notice_with_its_grace(preset, signum, grace_s) -> None:
    with preset().source() as source:
        signal.raise_signal(signum)
        notice = source.wait(timeout_s=60)
    assert notice is not None
    assert (notice.source, notice.grace_s) == (signum.name, grace_s)


def test_slurm_s_time_limit_is_the_grace(monkeypatch) -> None:
    end_s = int(time.time()) + 120
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(end_s))
    before_s = time.time()
    with TerminationConfig.slurm().source() as source:
        signal.raise_signal(signal.SIGTERM)
    assert source.notice is not None
    assert end_s - time.time() <= source.notice.grace_s <= end_s - before_s


def test_sigterm_on_google_cloud_leaves_half_a_minute() -> None:
    _, terminated = TerminationConfig.google_cloud(3600).sources or ()
    with terminated:
        signal.raise_signal(signal.SIGTERM)
    assert terminated.notice is not None
    assert terminated.notice.grace_s == 30.0


@pytest.mark.parametrize(
    ("grace_period", "notices", "leave_at_s"),
    [
        # (heard at, grace that the source tells)
        (None, [(100.0, None)], 100.0),
        (0, [(100.0, 30.0)], 100.0),
        (60, [(100.0, None)], 160.0),
        (60, [(100.0, 30.0)], 130.0),
        (60, [(100.0, 3600.0)], 160.0),
        (3600, [(100.0, None), (500.0, 30.0)], 530.0),
        (3600, [(100.0, 10.0), (500.0, 30.0)], 110.0),
    ],
)
def test_training_continues_until_the_earliest_grace_period_ends(
    grace_period, notices, leave_at_s
) -> None:
    config = TerminationConfig(grace_period=grace_period)
    heard = [
        Notice(source="test", message="Test.", heard_at_s=heard_at_s, grace_s=grace_s)
        for heard_at_s, grace_s in notices
    ]
    assert config.leave_at_s(heard) == leave_at_s


@pytest.mark.parametrize("grace_period", [-1, -0.001, float("nan"), float("inf")])
def test_negative_grace_is_refused(grace_period) -> None:
    with pytest.raises(ValueError, match=rf"grace_period={grace_period!r} is out of range"):
        TerminationConfig(grace_period=grace_period)


@pytest.mark.parametrize("interval_s", [0, -1, float("inf")])
def test_pause_has_to_be_above_0(interval_s) -> None:
    with pytest.raises(ValueError, match=rf"poll_interval_s={interval_s!r} is out of range"):
        TerminationConfig(poll_interval_s=interval_s)


@pytest.mark.parametrize(("name", "value"), [("grace_period", "60"), ("poll_interval_s", None)])
def test_time_that_is_no_number_is_refused(name, value) -> None:
    with pytest.raises(TypeError, match=f"{name}={value!r} is of type {type(value).__name__}"):
        TerminationConfig(**{name: value})


@pytest.mark.parametrize("name", ["termination_watcher_fn", "exit_fn", "save_fn"])
def test_function_that_cannot_be_called_is_refused(name) -> None:
    with pytest.raises(TypeError, match=rf"{name}=42 is not callable"):
        TerminationConfig(**{name: 42})
