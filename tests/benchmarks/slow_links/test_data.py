"""Examples of the benchmark."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.slow_links import data


@pytest.mark.slow
def test_text_predicts_the_next_character_of_real_documents() -> None:
    found = data.text()
    assert found.x.shape[1] == data.CONTEXT
    np.testing.assert_array_equal(found.x[:, 1:], found.y[:, :-1])
    assert found.x.max() < data.NUM_CHARACTERS
    windows = ["".join(map(chr, row)) for row in found.x]
    assert any("function" in one for one in windows)
    assert len(found.x) * data.CONTEXT > 500_000


@pytest.mark.slow
def test_validation_text_is_of_other_documents() -> None:
    found = data.text()
    trained = {row.tobytes() for row in found.x}
    assert not any(row.tobytes() in trained for row in found.validation_x if len(set(row)) > 4)


def test_digits_are_all_there_once() -> None:
    pytest.importorskip("sklearn")
    found = data.digits()
    assert len(found.x) + len(found.validation_x) == 1797
    assert found.x.shape[1:] == (8, 8, 1)
    assert set(found.y) == set(range(10))


def test_few_ids_have_most_of_the_clicks() -> None:
    found = data.clicks(20_000)
    assert found.x.max(axis=0)[0] < data.NUM_USERS
    assert found.x.max(axis=0)[1] < data.NUM_ITEMS
    _, counts = np.unique(found.x[:, 1], return_counts=True)
    assert np.sort(counts)[::-1][:100].sum() > 0.5 * counts.sum()
    assert 0.4 < found.y.mean() < 0.6


def test_parts_follow_each_other_and_begin_again() -> None:
    x = np.arange(5)
    found = data.Examples(x, -x, x, x)
    assert found.part(3, 7)[0].tolist() == [3, 4, 0, 1]
    assert found.part(3, 7)[1].tolist() == [-3, -4, 0, -1]
