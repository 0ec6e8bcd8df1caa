"""Output of one task on the screen, in its file and in memory."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys

import pytest

from stratagem.launch.options import LaunchOptions
from stratagem.launch.plan import plan_tasks
from stratagem.launch.tasks import output as line_buffer
from stratagem.launch.tasks.output import STDERR, STDOUT, Screen, TaskLog, TaskOutput


def a_plan(restart: int = 0):
    return plan_tasks(LaunchOptions(), ["run"], ports=[1], gpus=[], base={}, restart=restart)[0]


def shown() -> TaskOutput:
    return TaskOutput("worker 0", Screen(["worker 0"]))


def test_each_line_stands_behind_its_task_s_name(capsys) -> None:
    output = shown()
    output.take(b"one\ntw", 0.0, stream=STDOUT)
    output.take(b"warning\n", 0.0, stream=STDERR)
    output.take(b"o\n", 0.0, stream=STDOUT)
    assert capsys.readouterr() == ("[worker 0] one\n[worker 0] two\n", "[worker 0] warning\n")


def test_text_without_an_end_is_shown_at_last(capsys, monkeypatch) -> None:
    monkeypatch.setattr(line_buffer, "PATIENCE_S", 1.0)
    output = shown()
    output.take(b"left \xff", 0.0, stream=STDERR)
    output.show_overdue(0.5)
    assert capsys.readouterr() == ("", "")
    output.show_rest(1.0)
    assert capsys.readouterr() == ("", "[worker 0] left \ufffd\n")
    output.take(b"waits", 0.0, stream=STDOUT)
    output.show_overdue(1.0)
    assert capsys.readouterr() == ("[worker 0] waits\n", "")


def test_stderr_tells_why_and_stdout_where_there_is_none(capsys) -> None:
    output = shown()
    output.take(b"step 1\nstep 2\n", 0.0, stream=STDOUT)
    assert output.last_lines() == ("step 1", "step 2")
    output.take(b"error\n", 0.0, stream=STDERR)
    assert output.last_lines() == ("error",)


def test_only_the_end_is_kept_in_memory(capsys) -> None:
    output = shown()
    output.take(b"".join(b"%d\n" % i for i in range(1000)), 0.0, stream=STDOUT)
    assert output.last_lines() == tuple(map(str, range(600, 1000)))
    output.take(b"x" * 10_000 + b"\n", 0.0, stream=STDERR)
    assert output.last_lines() == ("x" * 2000,)


def test_file_holds_both_streams_as_they_came(tmp_path) -> None:
    folder = tmp_path / "a" / "b"
    for restart, text in ((0, b"old\n"), (0, b"one\r\n\xff"), (1, b"two\n")):
        output = TaskOutput("worker 0", None, TaskLog(a_plan(restart), folder, print))
        output.take(text, 0.0, stream=STDOUT)
        output.take(b"e\n", 0.0, stream=STDERR)
        output.close()
    assert [path.name for path in folder.iterdir()] == ["worker-0.log"]
    written = (folder / "worker-0.log").read_bytes()
    assert written == b"one\r\n\xffe\n=== restart 1 ===\ntwo\ne\n"


class Full(io.RawIOBase):
    """A disk that has room for a few bytes at a time, and then for none."""

    def __init__(self, room: int) -> None:
        self.kept, self._room = b"", room

    def write(self, data) -> int:
        part = bytes(data[: min(3, self._room - len(self.kept))])
        if not part:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.kept += part
        return len(part)


def test_full_disk_costs_lines_of_the_log_and_is_said_once(tmp_path) -> None:
    said: list[str] = []
    log = TaskLog(a_plan(), tmp_path, said.extend)
    log.close()
    log._file = disk = Full(10)
    for text in (b"short", b" writes", b" lost", b" lost"):
        log.write(text)
    log.close()
    assert disk.kept == b"short writ"
    assert said == [f"Lines are missing in {tmp_path / 'worker-0.log'}: No space left on device."]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_full_disk_below_the_screen_ends_nothing(monkeypatch) -> None:
    was_shown = False
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        screen = Screen(["worker 0"])
        for _ in range(2):
            screen.show("worker 0", ["a line"])
        was_shown = True
    assert was_shown


def test_folder_that_is_gone_ends_no_restart(tmp_path) -> None:
    (tmp_path / "logs").write_text("a file has its name")
    with pytest.raises(FileExistsError):
        TaskLog(a_plan(), tmp_path / "logs", print)
    said: list[str] = []
    log = TaskLog(a_plan(restart=1), tmp_path / "logs", said.extend)
    log.write(b"lost")
    log.close()
    assert len(said) == 1


# As jaxlib 0.10.2 prints them.
COORDINATION = (
    b"W1124 22:10:15.519896    5297 coordination_service.cc:185] [3068482070662432794] Using "
    b"experimental recoverable task feature. The default shutdown barrier will only block "
    b"non-recoverable tasks.\n"
)
GLOO = (
    b"[Gloo] Rank 1 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n"
)


def test_lines_that_nobody_can_act_on_are_in_the_file_only(capsys, tmp_path, monkeypatch) -> None:
    def printed(folder: str) -> TaskOutput:
        log = TaskLog(a_plan(), tmp_path / folder, print)
        output = TaskOutput("worker 0", Screen(["worker 0"]), log)
        output.take(b"one\n" + GLOO + b"two\n", 0.0, stream=STDOUT)
        output.take(COORDINATION + b"W1124 other.cc:1] act on this\n", 0.0, stream=STDERR)
        output.close()
        return output

    output = printed("first")
    assert capsys.readouterr() == (
        "[worker 0] one\n[worker 0] two\n",
        "[worker 0] W1124 other.cc:1] act on this\n",
    )
    assert output.last_lines() == ("W1124 other.cc:1] act on this",)
    (log,) = tmp_path.joinpath("first").iterdir()
    assert GLOO in log.read_bytes()
    assert COORDINATION in log.read_bytes()
    monkeypatch.setenv("STRATAGEM_FOREIGN_LINES", "1")
    printed("second")
    captured = capsys.readouterr()
    assert "[worker 0] [Gloo] Rank 1" in captured.out
    assert "recoverable task feature" in captured.err
