"""Process with streamed output."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from stratagem.launch.remote.ray.streamed_process import StreamedProcess
from tests.unit.launch.remote.living import wait_for_end


class Said:
    """What a process has printed."""

    def __init__(self) -> None:
        self.texts = {"out": "", "err": ""}
        self.changed = threading.Condition()

    def __call__(self, kind: str, text: str) -> None:
        with self.changed:
            self.texts[kind] += text
            self.changed.notify_all()

    def wait_for(self, text: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: text in self.texts["out"], 120), self.texts


def _started(program: str, said: Said, **variables: str) -> StreamedProcess:
    return StreamedProcess((sys.executable, "-uc", program), {**os.environ, **variables}, said)


def test_both_streams_and_the_exit_code_arrive() -> None:
    said = Said()
    program = "import os, sys; print('a\\rb\\u2713', os.environ['X']); sys.exit('bad')"
    with _started(program, said, X="y", PYTHONIOENCODING="utf-8") as process:
        assert process.wait() == 1
    assert said.texts == {"out": "a\rb\u2713 y\n", "err": "bad\n"}


def test_process_that_goes_on_is_ended_with_what_it_has_started() -> None:
    said = Said()
    program = (
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "child = subprocess.Popen(['sleep', '100'])\n"
        "print('child', child.pid, flush=True)\n"
        "child.wait()\n"
    )
    with _started(program, said) as process:
        said.wait_for("\n")
        assert process.wait(0.0) is None
        process.end()
        assert process.wait() == 5
    assert wait_for_end([int(said.texts["out"].split()[1])]) == set()


def test_process_that_will_not_end_is_killed() -> None:
    said = Said()
    program = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('ready', flush=True)\ntime.sleep(100)\n"
    )
    with _started(program, said) as process:
        said.wait_for("ready")
        process.end(grace_s=0.1)
        assert process.wait() == -9


def test_program_that_is_not_there_is_recognized_by_its_exit_code() -> None:
    said = Said()
    with StreamedProcess(("/no/such/program",), dict(os.environ), said) as process:
        assert process.wait() == 127
    assert "Cannot run /no/such/program" in said.texts["err"]


def test_folder_that_is_not_there_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        StreamedProcess((sys.executable, "-V"), dict(os.environ), Said(), "/no/such/folder")
