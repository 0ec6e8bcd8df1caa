"""Detection of a kernel, and text without control characters."""

from __future__ import annotations

import sys
import types

import pytest

from stratagem.logs import notebook_display, plain_text, printable

LINES = [
    ("plain \ttext", "plain \ttext", "plain \ttext"),
    ("\x1b[1m\x1b[32m50%\x1b[0m", "\x1b[1m\x1b[32m50%\x1b[0m", "50%"),
    ("\x1b[38;5;28;01mnone\x1b[39m", "\x1b[38;5;28;01mnone\x1b[39m", "none"),
    ("\x1b[?25l\x1b[2K\x1b[1Aup", "up", "up"),  # hide cursor, clear line, up
    ("\x1b]0;title\x07a\x1b]8;;http://b\x1b\\c", "ac", "ac"),  # title, link
    ("\x08\x08bell\x07\x00", "bell", "bell"),
    ("\x1b(B\x1b=end\x1b]never closed", "end", "end"),
    ("\x9b5D\x85next", "5Dnext", "5Dnext"),  # C1 controls
    ("\x1b", "\x1b", ""),
]


@pytest.mark.parametrize(("line", "shown", "plain"), LINES)
def test_only_colors_remain(line, shown, plain) -> None:
    assert printable(line) == shown
    assert plain_text(line) == plain


def _ipython(shell: object) -> types.ModuleType:
    module = types.ModuleType("IPython")
    vars(module)["get_ipython"] = lambda: shell
    return module


def test_kernel_has_a_display_and_others_have_none(monkeypatch) -> None:
    display = types.ModuleType("IPython.display")
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setitem(sys.modules, "IPython", _ipython(types.SimpleNamespace(kernel=object())))
    assert notebook_display() is display
    monkeypatch.setitem(sys.modules, "IPython", _ipython(types.SimpleNamespace()))  # a terminal
    assert notebook_display() is None
    monkeypatch.setitem(sys.modules, "IPython", _ipython(None))  # imported, not running
    assert notebook_display() is None
    monkeypatch.delitem(sys.modules, "IPython")
    assert notebook_display() is None
