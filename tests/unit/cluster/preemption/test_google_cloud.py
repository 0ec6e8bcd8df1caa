"""Notices from a fake metadata server of Google Cloud."""

from __future__ import annotations

import functools
import signal
import threading
import time
import urllib.error

import pytest

from stratagem.cluster.preemption import configuration as google_cloud
from stratagem.cluster.preemption.configuration import (
    GoogleCloudSource,
    PolledSource,
    PreemptionWatcher,
    TerminationConfig,
    name_of_environment,
    on_google_cloud,
    pod_time_left,
    slurm_time_left,
)
from stratagem.cluster.preemption.signals import SignalSource
from tests.unit.cluster.conftest import join_watchers

TIMEOUT_S = 60
PREEMPTED = "instance/preempted"
MAINTENANCE = "instance/maintenance-event"


@pytest.fixture(autouse=True)
def short_pause(monkeypatch) -> None:
    monkeypatch.setattr(google_cloud, "_PAUSE_S", 0.001)


@pytest.mark.parametrize(
    ("key", "value", "grace_s", "words"),
    [
        (PREEMPTED, "TRUE", 30.0, "preempts this Spot VM"),
        (PREEMPTED, "at the start", 30.0, "preempts this Spot VM"),
        (MAINTENANCE, "TERMINATE_ON_HOST_MAINTENANCE", None, "for maintenance of its host"),
    ],
)
def test_change_is_heard(metadata_server, key, value, grace_s, words) -> None:
    if value == "at the start":
        metadata_server.set(key, "TRUE")
    with GoogleCloudSource() as source:
        if value != "at the start":
            metadata_server.wait_for_requests(4)
            assert source.notice is None
            metadata_server.set(key, value)
        notice = source.wait(timeout_s=TIMEOUT_S)
    assert (notice.source, notice.grace_s) == (f"metadata {key}", grace_s)
    assert words in notice.message
    assert metadata_server.requests[:2] == [(PREEMPTED, False), (MAINTENANCE, False)]
    assert all(waits for _, waits in metadata_server.requests[2:])


def test_live_migration_is_no_notice(metadata_server) -> None:
    with GoogleCloudSource() as source:
        metadata_server.wait_for_requests(4)
        metadata_server.set(MAINTENANCE, "MIGRATE_ON_HOST_MAINTENANCE")
        metadata_server.wait_for_requests(5)
        assert source.notice is None
        metadata_server.set(MAINTENANCE, "TERMINATE_ON_HOST_MAINTENANCE")
        assert source.wait(timeout_s=TIMEOUT_S) is not None
        metadata_server.set(PREEMPTED, "TRUE")
        while len(source.notices) < 2:
            metadata_server.let_go()
    assert [notice.grace_s for notice in source.notices] == [None, 30.0]


def test_server_that_fails_now_and_then_is_asked_again(metadata_server) -> None:
    metadata_server.num_failing = 4
    with GoogleCloudSource() as source:
        metadata_server.wait_for_requests(8)
        metadata_server.set(PREEMPTED, "TRUE")
        assert source.wait(timeout_s=TIMEOUT_S) is not None


def test_server_that_stays_silent_is_an_error(metadata_server, monkeypatch) -> None:
    monkeypatch.setattr(google_cloud, "_MAX_SILENCE_S", 0.0)
    metadata_server.num_failing = 1000
    with (
        GoogleCloudSource() as source,
        pytest.raises(
            RuntimeError, match=r"did not return 'instance/\S+': HTTP Error 503"
        ) as error,
    ):
        source.wait(timeout_s=TIMEOUT_S)
    # The source keeps the error, which must not keep a connection.
    assert isinstance(error.value.__cause__, urllib.error.HTTPError)
    assert error.value.__cause__.closed


def test_server_that_does_not_wait_is_asked_after_a_pause(metadata_server, monkeypatch) -> None:
    monkeypatch.setattr(google_cloud, "_PAUSE_S", 3600.0)
    metadata_server.waits = False
    source = GoogleCloudSource()
    source.start()
    metadata_server.wait_for_requests(4)
    source.stop()
    join_watchers()
    assert len(metadata_server.requests) == 4


def test_change_after_the_end_is_not_heard(metadata_server) -> None:
    with GoogleCloudSource() as source:
        metadata_server.wait_for_requests(4)
    metadata_server.set(PREEMPTED, "TRUE")
    metadata_server.set(MAINTENANCE, "TERMINATE_ON_HOST_MAINTENANCE")
    join_watchers()
    assert source.notice is None


def test_machine_elsewhere_cannot_listen(monkeypatch) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    source = GoogleCloudSource()
    with pytest.raises(
        RuntimeError,
        match=r"did not return 'instance/preempted'(?s:.)*with a termination_watcher_fn",
    ):
        source.start()
    assert source.notice is None


@pytest.mark.parametrize(
    ("product", "expected"), [("Google Compute Engine\n", True), ("KVM\n", False), (None, False)]
)
def test_machine_is_known_by_its_firmware(tmp_path, monkeypatch, product, expected) -> None:
    if product is not None:
        (tmp_path / "product_name").write_text(product)
    monkeypatch.setattr(google_cloud, "_PRODUCT_NAME", tmp_path / "product_name")
    assert on_google_cloud() is expected


# A user's function is polled until it returns True; its errors are raised.


def test_function_is_asked_until_there_is_notice() -> None:
    answers = [False, False, True]
    with PolledSource(lambda: answers.pop(0), interval_s=0.001) as source:
        notice = source.wait(timeout_s=60)
        join_watchers()
    assert (notice.source, notice.grace_s) == ("termination_watcher_fn", None)
    assert notice.message == "The termination_watcher_fn returned True."
    assert (answers, source.notices) == ([], (notice,))


@pytest.mark.parametrize("answers_late", [False, True])
def test_function_is_not_heard_after_stop(answers_late) -> None:
    asked, released = threading.Event(), threading.Event()
    calls: list[None] = []

    def watch() -> bool:
        calls.append(None)
        asked.set()
        return answers_late and released.wait(60)

    source = PolledSource(watch, interval_s=3600)
    source.start()
    assert asked.wait(60)
    source.stop()
    released.set()
    join_watchers()
    assert len(calls) == 1
    assert source.notice is None


@pytest.mark.parametrize("answer", [None, "NONE", "TRUE", 2])
def test_answer_that_is_no_truth_value_is_an_error(answer) -> None:
    with (
        PolledSource(lambda: answer) as source,
        pytest.raises(TypeError, match=f"termination_watcher_fn returned {answer!r}"),
    ):
        source.wait(timeout_s=60)


# Detection of failures that are due to preemption.


def watcher_with_grace(grace_s: float) -> PreemptionWatcher:
    source = SignalSource(time_left_s=lambda: grace_s)
    return PreemptionWatcher(TerminationConfig(sources=[source]))


def test_message_tells_of_a_preemption(received) -> None:
    with PreemptionWatcher() as watcher:
        watcher.block_until_worker_exit()  # there is no notice
        assert watcher.preemption_message is None
        signal.raise_signal(signal.SIGTERM)
        watcher.block_until_worker_exit()  # the notice tells no time
        message = watcher.preemption_message
        assert message.startswith("SIGTERM was sent to process")
    assert received == []
    signal.raise_signal(signal.SIGTERM)
    assert received == [signal.SIGTERM]
    assert watcher.preemption_message == message


def test_machine_that_got_notice_is_waited_for() -> None:
    with watcher_with_grace(0.05) as watcher:
        before_s = time.monotonic()
        signal.raise_signal(signal.SIGTERM)
        watcher.block_until_worker_exit()
        assert time.monotonic() >= before_s + 0.05


def test_error_of_a_function_is_raised_where_somebody_looks() -> None:
    def watch() -> bool:
        raise OSError("no such file: /run/notice")

    with PreemptionWatcher(TerminationConfig(watch)) as watcher:
        with pytest.raises(OSError, match="no such file: /run/notice"):
            watcher._source.wait(timeout_s=60)
        with pytest.raises(OSError, match="no such file: /run/notice"):
            _ = watcher.preemption_message
        with pytest.raises(OSError, match="no such file"):
            watcher.block_until_worker_exit()


def test_waiting_ends_with_the_watcher() -> None:
    with watcher_with_grace(3600.0) as watcher:
        signal.raise_signal(signal.SIGTERM)
        thread = threading.Thread(target=watcher.block_until_worker_exit)
        thread.start()
    thread.join(60)
    assert not thread.is_alive()


# Detection of the environment and of the time it leaves.


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "Kubernetes"),
        ({"SLURM_JOB_ID": "7"}, "Slurm"),
        ({"GCE_METADATA_IP": "a"}, "Google Cloud"),
        ({"GCE_METADATA_IP": "a", "SLURM_JOB_ID": "7"}, "Slurm"),
        ({"GCE_METADATA_IP": "a", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "Kubernetes"),
    ],
)
def test_scheduler_stands_before_the_cloud(variables, given, name) -> None:
    variables(**given)
    assert name_of_environment() == name


def test_pod_uses_its_grace_period(monkeypatch) -> None:
    assert pod_time_left()() == 30.0
    monkeypatch.setenv("STRATAGEM_POD_GRACE_S", "120")
    assert pod_time_left()() == 120.0
    assert pod_time_left(90)() == 90.0


_NO_TIMES = (0, -3.0, float("inf"), float("nan"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        *(
            (functools.partial(pod_time_left, one), f"A pod's grace_s={one!r} is out of rang")
            for one in _NO_TIMES
        ),
        *(
            (
                functools.partial(PolledSource, bool, interval_s=one),
                f"interval_s={one!r} is out of range",
            )
            for one in _NO_TIMES
        ),
        (pod_time_left, "STRATAGEM_POD_GRACE_S: '2m' is not a time limit"),
        (slurm_time_left, "SLURM_JOB_END_TIME='UNLIMITED' is not a time"),
    ],
)
def test_time_that_cannot_be_is_refused(variables, make, words) -> None:
    variables(STRATAGEM_POD_GRACE_S="2m", SLURM_JOB_END_TIME="UNLIMITED")
    with pytest.raises(ValueError, match=words):
        make()


def test_slurm_job_has_the_time_until_its_limit(monkeypatch) -> None:
    assert slurm_time_left() is None
    end_s = int(time.time()) + 500
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(end_s))
    left = slurm_time_left()
    assert left is not None
    before_s = time.time()
    left_s = left()
    assert end_s - time.time() <= left_s <= end_s - before_s
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1000")
    over = slurm_time_left()
    assert over is not None
    assert over() == 0.0
