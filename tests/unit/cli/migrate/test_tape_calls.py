"""Calls of `gradient` and `minimize` in a list of statements."""

from __future__ import annotations

import libcst as cst
import pytest

from stratagem.cli.migrate.names import code_of
from stratagem.cli.migrate.tapes import UnusualTapeError, find_gradients


def _find(code: str):
    return find_gradients(cst.parse_module(code).body, "t")


def test_assignment() -> None:
    (call,) = _find("x = 1\na, b = t.gradient(loss, m.w + n)\n")
    assert (call.index, call.loss, call.target, call.remaining) == (1, "loss", "(a, b)", ())
    assert call.loss_names == {"loss"}
    assert call.source_names == {"m", "n"}


def test_within_another_call() -> None:
    (call,) = _find("o.apply_gradients(zip(t.gradient(sources=v, target=a * b), v))\n")
    assert (call.loss, call.loss_names, call.target) == (None, {"a", "b"}, "gradients")
    assert [code_of(one) for one in call.remaining] == ["o.apply_gradients(zip(gradients, v))\n"]


def test_minimize() -> None:
    (call,) = _find("o.minimize(loss, v, tape=t)\n")
    assert [code_of(one) for one in call.remaining] == ["o.apply_gradients(zip(gradients, v))\n"]


def test_other_tapes_and_statements() -> None:
    assert _find("g = u.gradient(loss, v)\no.minimize(f, v)\nt.stop()\n") == []


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("if a:\n    g = t.gradient(l, v)\n", "nested statement"),
        ("g = t.gradient(l, v); x = 1\n", "nested statement"),
        ("g = t.gradient(l)\n", "other arguments"),
        ("g = [t.gradient(l, v), t.gradient(k, v)]\n", "several calls"),
    ],
)
def test_unusual(code, words) -> None:
    with pytest.raises(UnusualTapeError, match=words):
        _find(code)
