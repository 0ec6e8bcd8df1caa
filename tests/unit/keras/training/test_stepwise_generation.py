"""Generation in programs of a few tokens: columns, stop tokens, and the end of a length."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from stratagem.keras.training.generate_stream import generate_stepwise
from tests.unit.keras.training.small_decoder import Decoder, Letters


@pytest.mark.parametrize("stops", [None, tuple(range(1, 32))])
def test_columns_follow_each_other_up_to_the_end(stops: tuple[int, ...] | None) -> None:
    keras.utils.set_random_seed(0)
    model = Decoder()
    prompts = Letters().generate_preprocess(["abc", "a"], 8)
    whole = model.generate(prompts, stop_token_ids=stops)
    pieces = list(generate_stepwise(model, prompts, stops, 3))
    # With every token but padding a stop, both rows are done after the fourth column.
    ends = [4, 7, 8] if stops is None else [4]
    assert [(one.start, one.end) for one in pieces] == list(zip([1, *ends[:-1]], ends, strict=True))
    assert np.array_equal(pieces[-1].token_ids, whole["token_ids"])
    assert np.array_equal(pieces[-1].padding_mask, whole["padding_mask"])


def test_prompts_that_fill_the_length_yield_nothing() -> None:
    prompts = Letters().generate_preprocess(["abc", "abe"], 3)
    assert list(generate_stepwise(Decoder(), prompts, None, 1)) == []
