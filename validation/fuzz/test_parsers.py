"""Each parser that is fuzzed takes its valid inputs, and the fuzzer's own small ones."""

from __future__ import annotations

import pytest

from validation.fuzz.parsers import PARSERS


@pytest.mark.parametrize("name", PARSERS)
def test_inputs_of_the_corpus_are_harmless(name: str) -> None:
    parse, inputs = PARSERS[name]
    assert inputs
    for data in (*inputs, b"", b"\n", b"{}", b"[" * 3000, *(one[:-3] for one in inputs)):
        parse(data)
