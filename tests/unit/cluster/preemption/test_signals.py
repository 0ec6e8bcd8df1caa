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

from stratagem.cluster.preemption.configuration import TerminationConfig
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
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


NOTE_AND_LEAVE = """
import sys
from stratagem.cluster.preemption import TerminationConfig
config = TerminationConfig().for_environment()
with config.source() as source:
    print("ready")
    notice = source.wait(timeout_s=60)
    print(notice.source, notice.message)
    config.exit()
"""


def test_sigterm_is_noted_and_the_program_leaves_with_its_code(child) -> None:
    process = child(NOTE_AND_LEAVE)
    os.kill(process.pid, signal.SIGTERM)
    assert line(process) == f"SIGTERM SIGTERM was sent to process {process.pid}."
    assert process.wait(TIMEOUT_S) == 42


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


def test_nothing_is_touched_before_a_source_is_started() -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert before == signal.SIG_DFL
    TerminationConfig().for_environment().source()
    assert signal.getsignal(signal.SIGTERM) is before


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


def test_no_signal_is_refused() -> None:
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
def test_signal_while_python_ends_changes_the_exit_code_unless_it_is_ignored(
    ignores, code, child
) -> None:
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
