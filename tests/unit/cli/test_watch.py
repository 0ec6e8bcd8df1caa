"""`stratagem watch`: frames, JSON, exports and exit codes."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time

import pytest
from click.testing import Result

from stratagem.cli import main
from stratagem.observe.run_events.records import encode
from tests.command_runner import CliRunner
from tests.unit.observe.goodput.runs import end, first_step, process, run, straggling, write


def _call(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["watch", *map(str, arguments)])


@pytest.mark.parametrize("options", [["--once"], []])
def test_one_frame_without_a_terminal(tmp_path, options) -> None:
    write(tmp_path, straggling())
    result = _call(tmp_path, *options)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "101 of 101" in result.stdout
    assert "Goodput after start-up: " in result.stdout


def test_json_is_the_state_and_the_account(tmp_path) -> None:
    write(tmp_path, straggling())
    values = json.loads(_call(tmp_path, "--json").stdout)
    assert (values["step"], values["values"]["loss"]) == (101, 1.0)
    assert values["account"]["startup_s"] == pytest.approx(10)


@pytest.mark.parametrize("options", [["--once"], ["--json"], []])
def test_folder_without_events_ends_with_exit_code_1(tmp_path, options) -> None:
    result = _call(tmp_path / "missing", *options)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "has no events." in result.stderr


def test_torn_line_and_unknown_event_are_reported_and_no_error(tmp_path) -> None:
    write(tmp_path, straggling())
    with (tmp_path / "events" / "worker-0.0.jsonl").open("a") as file:
        file.write('{"version": 1, "kind": "coffee"}\n{"version": 1, "ki')
    result = _call(tmp_path, "--once")
    assert result.exit_code == 0
    assert "its kind is 'coffee'" in " ".join(result.stdout.split())


def test_interval_that_is_no_time_is_refused(tmp_path) -> None:
    assert _call(tmp_path, "--interval", "0").exit_code == 2


@pytest.mark.slow
def test_terminal_is_followed_until_the_run_is_over(tmp_path) -> None:
    write(tmp_path, run(process("worker 0", 0, first_step(5, 1))))
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "stratagem", "watch", str(tmp_path), "--interval", "0.1"]
    with subprocess.Popen(
        command, stdin=terminal, stdout=terminal, env=os.environ | {"TERM": "xterm"}
    ) as watching:
        os.close(terminal)
        shown = b""
        deadline_s = time.monotonic() + 60
        while b"worker 0" not in shown and time.monotonic() < deadline_s:
            shown += os.read(controller, 65536)
        with (tmp_path / "events" / "worker-0.0.jsonl").open("a") as file:
            file.write(encode(end(6)) + "\n")
        while True:
            try:
                shown += os.read(controller, 65536)
            except OSError:  # the terminal is closed
                break
        assert watching.wait(60) == 0
    os.close(controller)
    assert b"finished" in shown
