"""Chains of tf.data: their parts."""

from __future__ import annotations

import libcst as cst
import pytest

from stratagem.cli.migrate.context import dotted
from stratagem.cli.migrate.datasets import UnknownChainError, chain_of, converted_chain


def _chain(code: str):
    return chain_of(cst.parse_expression(code), _name_of)


def _name_of(node: cst.CSTNode) -> str | None:
    return (dotted(node) or "").removeprefix("tf.") or None


def test_parts() -> None:
    chain = _chain("tf.data.Dataset.range(3).shuffle(9, seed=1).batch(batch_size=2)")
    assert chain.source.name == "range"
    assert chain.base is None
    assert [one.name for one in chain.operations] == ["shuffle", "batch"]
    assert chain.operations[0].argument(1, "seed") == "1"
    assert chain.operations[1].argument(0, "batch_size") == "2"
    assert chain.operations[1].argument(1, "drop_remainder") is None


def test_chain_of_a_variable_continues_another() -> None:
    first, second = _chain("tf.data.Dataset.range(3)"), _chain("d.batch(2)")
    assert (second.source, second.base) == (None, "d")
    assert converted_chain(first.then(second)) == (
        "sg.input.Dataset",
        ["np.arange(3)", "batch_size=2"],
        "",
    )
    with pytest.raises(UnknownChainError, match="no source"):
        converted_chain(second)


@pytest.mark.parametrize(
    ("operations", "words"),
    [
        ("range(3).batch(2).map(f)", "of batches"),
        ("from_tensors(3).repeat().batch(2)", r"repeat\(\) without a count"),
    ],
)
def test_unknown_chain(operations, words) -> None:
    with pytest.raises(UnknownChainError, match=words):
        converted_chain(_chain(f"tf.data.Dataset.{operations}"))


@pytest.mark.parametrize("code", ["d", "f(x)", "f().batch(2)", "1"])
def test_other_expressions(code) -> None:
    assert _chain(code) is None
