"""Real signals become notices, and the previous handlers are restored."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from stratagem.cli.manifests.rendering import kubernetes_template, render_slurm, slurm_template
from stratagem.cluster.preemption.configuration import (
    EXIT_CODE,
    GoogleCloudSource,
    TerminationConfig,
)
from stratagem.cluster.preemption.notices import AnySource, Notice, NoticeSource
from stratagem.cluster.preemption.signals import SignalSource, ignore_until_exit
from tests.fresh_process import run_fresh

TIMEOUT_S = 60


@pytest.fixture
def child() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts a program and waits for its first line, "ready"."""
    processes: list[subprocess.Popen[str]] = []

    def start(program: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert line(process) == "ready"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate(timeout=TIMEOUT_S)


def line(process: subprocess.Popen[str]) -> str:
    return process.stdout.readline().rstrip("\n")


WORK_UNTIL_KILLED = """
import os, threading, time
from stratagem.cluster.preemption import SignalSource

def say(line):
    os.write(1, line.encode() + b"\\n")  # whole, also from two threads

def wait():
    say("thread " + source.wait(timeout_s=60).source)

source = SignalSource()
source.start()
threading.Thread(target=wait, daemon=True).start()
say("ready")
for number in (1, 2):
    while len(source.notices) < number:
        pass
    say(f"noted {number}")
# Python runs a handler between two of its steps: one that blocks for ever might be the last.
for _ in range(6000):
    time.sleep(0.01)
"""


def test_another_thread_is_woken_and_the_third_signal_ends_the_process(child) -> None:
    process = child(WORK_UNTIL_KILLED)
    os.kill(process.pid, signal.SIGTERM)
    assert {line(process), line(process)} == {"thread SIGTERM", "noted 1"}
    os.kill(process.pid, signal.SIGTERM)
    assert line(process) == "noted 2"
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(TIMEOUT_S) == -signal.SIGTERM


def test_forked_child_is_ended_as_ever() -> None:
    # Pools end their processes by SIGTERM, and wait for them. Python forgets what comes to a child
    # before it has looked around, so that the child says when it has.
    program = """
import os, signal, time
from stratagem.cluster.preemption import SignalSource
readable, writable = os.pipe()
with SignalSource() as source:
    child = os.fork()
    if child == 0:
        os.write(writable, b"ready")
        for _ in range(600):
            time.sleep(0.1)
        os._exit(1)
    os.read(readable, 5)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), source.notice)
"""
    assert run_fresh(program) == [f"{-signal.SIGTERM} None"]


def test_child_that_listens_itself_hears_its_own() -> None:
    program = """
import os, signal
from stratagem.cluster.preemption import SignalSource
with SignalSource() as source:
    child = os.fork()
    if child == 0:
        with SignalSource() as own:
            signal.raise_signal(signal.SIGTERM)
            os._exit(len(own.notices) + 10 * len(source.notices))
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), source.notice)
"""
    assert run_fresh(program) == ["1 None"]


def test_selected_signals_are_heard_and_no_other(received) -> None:
    with SignalSource(["SIGUSR1", signal.SIGTERM, "SIGTERM"], time_left_s=lambda: 7.5) as source:
        assert source.signals == (signal.SIGUSR1, signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR2)
        assert (received, source.notice) == ([signal.SIGUSR2], None)
        before_s = time.monotonic()
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
    assert [notice.source for notice in source.notices] == ["SIGUSR1", "SIGTERM"]
    assert [notice.grace_s for notice in source.notices] == [7.5, 7.5]
    assert before_s <= source.notices[0].heard_at_s <= source.notices[1].heard_at_s
    assert received == [signal.SIGUSR2]


def test_handler_that_was_there_gets_the_third_signal_and_all_after_the_end(received) -> None:
    with SignalSource() as source:
        for _ in range(4):
            signal.raise_signal(signal.SIGTERM)
        assert len(source.notices) == 2
        assert received == [signal.SIGTERM] * 2
    signal.raise_signal(signal.SIGTERM)
    assert len(received) == 3
    assert len(source.notices) == 2


def test_ignored_signal_is_heard_and_ignored_again() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with SignalSource("SIGUSR1") as source:
            for _ in range(3):
                signal.raise_signal(signal.SIGUSR1)
        assert len(source.notices) == 2
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_sources_hear_one_signal_and_end_in_any_order(received, order) -> None:
    sources = [SignalSource(), SignalSource()]
    for source in sources:
        source.start()
    signal.raise_signal(signal.SIGTERM)
    sources[order[0]].stop()
    signal.raise_signal(signal.SIGTERM)
    sources[order[1]].stop()
    assert [len(sources[index].notices) for index in order] == [1, 2]
    assert received == []
    signal.raise_signal(signal.SIGTERM)
    assert received == [signal.SIGTERM]


def test_handler_that_was_set_since_stays(received) -> None:
    later: list[int] = []
    with SignalSource() as source:
        ours = signal.signal(signal.SIGTERM, lambda signum, _: later.append(signum))
    signal.raise_signal(signal.SIGTERM)
    assert (later, received, source.notice) == ([signal.SIGTERM], [], None)
    # It may call what it has found, which nobody listens to any more.
    assert callable(ours)
    ours(signal.SIGTERM, None)
    assert received == [signal.SIGTERM]


def test_source_stopped_by_another_thread_keeps_the_previous_handler_in_effect(received) -> None:
    source = SignalSource()
    source.start()
    thread = threading.Thread(target=source.stop)
    thread.start()
    thread.join()
    signal.raise_signal(signal.SIGTERM)
    assert (received, source.notice) == ([signal.SIGTERM], None)


def test_signal_that_comes_while_waiting_is_heard_every_time() -> None:
    pid = os.getpid()
    for _ in range(200):
        with SignalSource() as source:
            thread = threading.Thread(target=os.kill, args=(pid, signal.SIGTERM))
            thread.start()
            assert source.wait(timeout_s=TIMEOUT_S) is not None
            thread.join()


def test_other_threads_are_refused() -> None:
    errors: list[str] = []

    def start() -> None:
        with pytest.raises(RuntimeError, match="listen to signals in thread 'other'") as error:
            SignalSource().start()
        errors.append(str(error.value))

    thread = threading.Thread(target=start, name="other")
    thread.start()
    thread.join()
    (error,) = errors
    assert "pass a termination_watcher_fn" in error


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of other handlers")
def test_handler_that_python_does_not_know_of_is_not_lost() -> None:
    faulthandler.register(signal.SIGUSR2)
    try:
        with pytest.raises(RuntimeError, match="SIGUSR2 has a handler that was not set from Pyth"):
            SignalSource(["SIGTERM", "SIGUSR2"]).start()
    finally:
        faulthandler.unregister(signal.SIGUSR2)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with SignalSource(["SIGUSR2"]) as source:
        signal.raise_signal(signal.SIGUSR2)
    assert source.notice is not None


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "TERM", 9, 11, 0, None])
def test_other_signals_are_no_notice(name) -> None:
    with pytest.raises(ValueError, match=f"Signal {name!r} cannot be a notice"):
        SignalSource([name])
    with pytest.raises(ValueError, match="The list of signals is empty"):
        SignalSource([])


LAST_SIGNAL = """
import os, signal, sys
from stratagem.cluster.preemption import SignalSource
from stratagem.cluster.preemption.signals import ignore_until_exit

class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), signum=signal.SIGTERM):
        kill(pid, signum)

SignalSource().start()
sys.last = Last()  # is taken apart after the handlers of signals
if {ignores}:
    ignore_until_exit()
print("ready")
sys.exit(42)
"""


@pytest.mark.parametrize(("ignores", "code"), [(True, 42), (False, -signal.SIGTERM)])
def test_signal_while_python_ends_changes_the_code_unless_ignored(ignores, code, child) -> None:
    assert child(LAST_SIGNAL.format(ignores=ignores)).wait(TIMEOUT_S) == code


def test_only_signals_with_listeners_are_ignored_until_exit(received) -> None:
    with SignalSource():
        ignore_until_exit()
        signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        signal.raise_signal(signal.SIGUSR1)
    ignore_until_exit()
    assert received == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_IGN


# Termination configurations: defaults, presets of each environment, and user's choices.

GOOGLE = {"GCE_METADATA_HOST": "127.0.0.1:1"}


def code_of(config: TerminationConfig) -> object:
    with pytest.raises(SystemExit) as left:
        config.exit()
    return left.value.code


@pytest.mark.parametrize(
    ("given", "code", "grace_s", "sources"),
    [
        ({}, 42, 0, [SignalSource]),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, 42, 0, [SignalSource]),
        ({"SLURM_JOB_ID": "7"}, 42, 0, [SignalSource]),
        (GOOGLE | {"CUDA_VISIBLE_DEVICES": "0"}, 143, 3600, [GoogleCloudSource, SignalSource]),
        (GOOGLE | {"CUDA_VISIBLE_DEVICES": ""}, 143, 0, [GoogleCloudSource, SignalSource]),
    ],
)
def test_environment_fills_in_missing_values(variables, given, code, grace_s, sources) -> None:
    variables(**given)
    config = TerminationConfig().for_environment()
    assert code_of(config) == code
    assert config.grace_period == grace_s
    assert [type(source) for source in config.sources or ()] == sources
    assert (config.termination_watcher_fn, config.save_fn) == (None, None)


@pytest.mark.parametrize("given", [{}, {"SLURM_JOB_ID": "7"}, GOOGLE])
def test_chosen_values_are_kept(variables, given) -> None:
    variables(**given)
    chosen = TerminationConfig(lambda: True, lambda: sys.exit(7), 5.0, print)
    config = chosen.for_environment()
    assert config == chosen
    assert code_of(config) == 7
    # The function alone is listened to, as in TensorFlow: SIGTERM ends the program as ever.
    with config.source() as source:
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        notice = source.wait(timeout_s=60)
    assert notice.source == "termination_watcher_fn"


def test_configuration_without_an_environment_exits_with_42() -> None:
    assert code_of(TerminationConfig()) == EXIT_CODE == 42


def test_templates_take_the_exit_code_for_saved() -> None:
    assert f"values: [{EXIT_CODE}]" in kubernetes_template()
    assert f'if [ "$status" -eq {EXIT_CODE} ]; then' in slurm_template()
    assert "#SBATCH --signal=TERM@" in render_slurm()


@pytest.mark.parametrize(
    ("preset", "signum", "grace_s"),
    [
        (lambda: TerminationConfig.kubernetes(), signal.SIGTERM, 30.0),
        (lambda: TerminationConfig.kubernetes(grace_s=120), signal.SIGTERM, 120.0),
        (lambda: TerminationConfig.slurm(), signal.SIGTERM, None),
        (lambda: TerminationConfig.slurm(["SIGTERM", "SIGUSR1"]), signal.SIGUSR1, None),
        (lambda: TerminationConfig(sources=[SignalSource("SIGUSR2")]), signal.SIGUSR2, None),
        (lambda: TerminationConfig(lambda: False, sources=[SignalSource()]), signal.SIGTERM, None),
        (
            lambda: TerminationConfig(sources=TerminationConfig.google_cloud(3600).sources[1:]),
            signal.SIGTERM,
            30.0,
        ),
    ],
    ids=["kubernetes", "with its grace", "slurm", "of two", "another", "and a function", "google"],
)
def test_signal_of_a_scheduler_is_notice_with_its_grace(preset, signum, grace_s) -> None:
    with preset().source() as source:
        signal.raise_signal(signum)
        notice = source.wait(timeout_s=60)
    assert (notice.source, notice.grace_s) == (signum.name, grace_s)


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
def test_training_goes_on_until_the_earliest_grace_ends(grace_period, notices, leave_at_s) -> None:
    config = TerminationConfig(grace_period=grace_period)
    heard = [
        Notice(source="test", message="Test.", heard_at_s=heard_at_s, grace_s=grace_s)
        for heard_at_s, grace_s in notices
    ]
    assert config.leave_at_s(heard) == leave_at_s


@pytest.mark.parametrize(
    ("name", "value", "error", "words"),
    [
        *(
            ("grace_period", time_s, ValueError, "is out of range")
            for time_s in (-1, -0.001, float("nan"), float("inf"))
        ),
        *(
            ("poll_interval_s", time_s, ValueError, "is out of range")
            for time_s in (0, -1, float("inf"))
        ),
        ("grace_period", "60", TypeError, "is of type str"),
        ("poll_interval_s", None, TypeError, "is of type NoneType"),
        *(
            (name, 42, TypeError, "is of type int")
            for name in ("termination_watcher_fn", "exit_fn", "save_fn")
        ),
    ],
)
def test_value_that_cannot_be_is_refused(name, value, error, words) -> None:
    with pytest.raises(error, match=rf"{name}={value!r} {words}"):
        TerminationConfig(**{name: value})
    with pytest.raises(ValueError, match="The list of notice sources is empty"):
        TerminationConfig(sources=()).source()


# Notices stay in order, combine several sources, and wake waiting threads.


class Told(NoticeSource):
    """A source that receives notices from the test."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.calls: list[str] = []
        self._error = error

    def _listen(self) -> None:
        self.calls.append("listen")
        if self._error is not None:
            raise self._error

    def _end(self) -> None:
        self.calls.append("end")


FIRST = Notice(source="a", message="First.", heard_at_s=10.0, grace_s=5.0)
SECOND = Notice(source="b", message="Second.", heard_at_s=11.0)


def test_first_notice_stays_and_all_are_kept() -> None:
    with Told() as source:
        assert (source.notice, source.notices) == (None, ())
        assert source.wait(timeout_s=0) is None
        source.hear(FIRST)
        source.hear(SECOND)
    assert source.notice is FIRST
    assert source.notices == (FIRST, SECOND)
    assert source.wait(timeout_s=-1) is FIRST


def test_error_comes_out_where_somebody_looks_unless_there_is_notice() -> None:
    error = OSError("no answer")
    with Told() as source:
        source.fail(error)
        for look in (lambda: source.notice, lambda: source.wait(timeout_s=60)):
            with pytest.raises(OSError, match="no answer") as raised:
                look()
            assert raised.value is error
        source.hear(FIRST)
        assert source.notice is FIRST


def test_error_that_is_raised_again_keeps_no_earlier_frames() -> None:
    source = Told()
    try:
        raise ValueError("the function")
    except ValueError as error:
        source.fail(error)
    counts = set[int]()
    for _ in range(3):
        with pytest.raises(ValueError, match="the function") as caught:
            _ = source.notice
        counts.add(len(caught.traceback))
    assert counts == {3}  # here twice, and in `notice`


def test_source_listens_once() -> None:
    source = Told()
    source.stop()
    assert source.calls == []
    source.start()
    source.stop()
    source.stop()
    assert source.calls == ["listen", "end"]
    with pytest.raises(RuntimeError, match="This Told was already started"):
        source.start()


def test_any_of_several_sources_is_heard() -> None:
    sources = [Told(), Told()]
    with AnySource(sources) as both:
        sources[1].hear(FIRST)
        assert both.wait(timeout_s=60) is FIRST
        sources[0].hear(SECOND)
        assert both.notices == (FIRST, SECOND)
    assert [source.calls for source in sources] == [["listen", "end"]] * 2


def test_sources_that_had_started_are_stopped_where_one_cannot() -> None:
    sources = [Told(), Told(OSError("no")), Told()]
    with pytest.raises(OSError, match="no"):
        AnySource(sources).start()
    assert [source.calls for source in sources] == [["listen", "end"], ["listen"], []]
