"""Markdown in a terminal with and without colors, and in a pipe."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from stratagem.cli.markdown import show

pty = pytest.importorskip("pty", reason="pseudo-terminals are of POSIX")

TEXT = "# Title\n\nSome `code`.\n\n"


def test_pipe_shows_the_text_itself(capsys) -> None:
    show(TEXT)
    assert capsys.readouterr().out == "# Title\n\nSome `code`.\n"


def _in_terminal(**variables: str) -> str:
    """Returns what is printed into a terminal."""
    reader, writer = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "100"} | variables
    program = f"from stratagem.cli.markdown import show; show({TEXT!r})"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=writer, env=environment) as process:
        os.close(writer)
        printed = b""
        try:
            while part := os.read(reader, 4096):
                printed += part
        except OSError:  # Linux: the other end is closed
            pass
        os.close(reader)
        assert process.wait(60) == 0
    return printed.decode().replace("\r\n", "\n")


def test_terminal_shows_rendered_markdown() -> None:
    rendered = _in_terminal()
    assert "\x1b[" in rendered
    assert "Title" in rendered
    assert "# Title" not in rendered
    assert "`code`" not in rendered


def test_terminal_without_colors_shows_the_text_itself() -> None:
    assert _in_terminal(NO_COLOR="1") == "# Title\n\nSome `code`.\n"
