"""Statements of each loss of a block."""

from __future__ import annotations

import libcst as cst
import pytest

from stratagem.cli.migrate.names import code_of
from stratagem.cli.migrate.tapes import UnusualTapeError, find_gradients, split_losses


def _split(block: str, *calls: str) -> list[tuple[str, list[str]]]:
    found = [one for call in calls for one in find_gradients(cst.parse_module(call).body, "t")]
    parts = split_losses(cst.parse_module(block).body, found)
    return [("".join(code_of(one) for one in part.statements), part.repeated) for part in parts]


def test_shared_value_is_reused_unless_it_depends_on_the_variables() -> None:
    block = "x = f(a)\ny = w(x)\nm.update(y)\nk = g(y)\nl = h(y)\n"
    assert _split(block, "p = t.gradient(k, v)\n", "q = t.gradient(l, u)\n") == [
        ("x = f(a)\ny = w(x)\nm.update(y)\nk = g(y)\n", []),
        ("l = h(y)\n", []),
    ]
    assert _split(block, "p = t.gradient(k, v)\n", "q = t.gradient(l, w.weights)\n") == [
        ("x = f(a)\ny = w(x)\nm.update(y)\nk = g(y)\n", []),
        ("y = w(x)\nl = h(y)\n", ["y"]),
    ]


def test_loss_outside_of_the_block() -> None:
    with pytest.raises(UnusualTapeError, match="outside of the block"):
        _split("k = f()\n", "p = t.gradient(k, v)\n", "q = t.gradient(l, v)\n")
