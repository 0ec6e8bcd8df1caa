"""Distinct keys of a step, beside dictionaries."""

from __future__ import annotations

import numpy as np
import pytest

import stratagem as sg
from stratagem.parameter_server.client.remote_steps import StepKeys, as_keys
from stratagem.parameter_server.client.shard_layout import KeyLayout, layout_of_keys

RNG = np.random.default_rng(0)
LOOKUPS = [
    RNG.integers(-(2**63), 2**63, 50)[RNG.integers(0, 50, (8, 3))],
    np.array([[0, -(2**63), 2**63 - 1], [-1, 0, 0]]),
    np.empty((0, 4), np.int64),
    RNG.integers(0, 5, 40),
]


LAYOUTS = [None, layout_of_keys("t", (2,), "float32", range(3))]


def step_keys(*, skips_zero: bool = False, layout: KeyLayout | None = None) -> StepKeys:
    lookups = [sg.embedding.keys(one) for one in LOOKUPS]
    return StepKeys(lookups, skips_zero=skips_zero, layout=layout)


def test_pairs_are_the_numbers() -> None:
    for one in LOOKUPS:
        assert np.array_equal(as_keys(sg.embedding.keys(one)), one)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("skips_zero", [False, True])
def test_places_are_those_of_the_distinct_keys(skips_zero, layout) -> None:
    found = step_keys(skips_zero=skips_zero, layout=layout)
    everything = {key for one in LOOKUPS for key in one.ravel().tolist()}
    expected = everything - {0} if skips_zero else everything
    assert sorted(found.keys.tolist()) == sorted(expected)
    for keys, places in zip(LOOKUPS, found.places, strict=True):
        assert (places.shape, places.dtype) == (keys.shape, np.int32)
        is_skipped = (keys == 0) & skips_zero
        assert (places[is_skipped] == -1).all()
        assert np.array_equal(found.keys[places[~is_skipped]], keys[~is_skipped])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("skips_zero", [False, True])
def test_rows_are_those_of_the_keys(skips_zero, layout) -> None:
    found = step_keys(skips_zero=skips_zero, layout=layout)
    rows = np.stack([found.keys % 97, found.keys % 89], -1).astype("float32")
    for keys, places in zip(LOOKUPS, found.places, strict=True):
        expected = np.stack([keys % 97, keys % 89], -1).astype("float32")
        if skips_zero:
            expected[keys == 0] = 0
        np.testing.assert_array_equal(found.rows(rows, places), expected)


def test_gradients_are_summed_by_key_and_others_left_out() -> None:
    found = StepKeys([sg.embedding.keys([5, 9, 5, 0, 7])], skips_zero=True)
    places = found.places[0].tolist()
    unused = [-1, len(found.keys), 2**31 - 1]  # padding, and what a sum over equal places leaves
    given = np.array([*places[:4], *unused], np.int32)  # nothing for the key 7
    rows = np.array([[1.0], [2], [4], [8], [16], [32], [64]], np.float32)
    keys, sums = found.gradients(given, rows)
    assert dict(zip(keys.tolist(), sums.ravel().tolist(), strict=True)) == {5: 5.0, 9: 2.0}


def test_gradients_of_all_keys_are_pushed_without_hashing() -> None:
    found = step_keys(layout=LAYOUTS[1])
    places = np.concatenate([one.ravel() for one in found.places])
    rows = np.ones((len(places), 2), np.float32)
    keys, sums = found.gradients(places, rows)
    assert keys is found.distinct
    counts = np.bincount(places)
    np.testing.assert_array_equal(sums, np.stack([counts, counts], -1))
    found.add(sg.embedding.keys([12345678901]))
    assert found.distinct is found.keys


def test_step_of_padding_alone_has_no_gradient() -> None:
    found = StepKeys([sg.embedding.keys([0, 0])], skips_zero=True)
    rows = found.rows(np.empty((0, 3), np.float32), found.places[0])
    np.testing.assert_array_equal(rows, np.zeros((2, 3)))
    keys, sums = found.gradients(found.places[0], np.ones((2, 3), np.float32))
    assert (keys.shape, sums.shape) == ((0,), (0, 3))


@pytest.mark.parametrize("skips_zero", [False, True])
def test_added_keys_leave_the_places_of_others(skips_zero) -> None:
    found = StepKeys([np.empty((0, 2), np.uint32)], skips_zero=skips_zero)
    places = [found.add(sg.embedding.keys(one)) for one in LOOKUPS]
    for keys, own in zip(LOOKUPS, places, strict=True):
        is_skipped = (keys == 0) & skips_zero
        assert (own[is_skipped] == -1).all()
        assert np.array_equal(found.keys[own[~is_skipped]], keys[~is_skipped])
    assert len(found.keys) == len(np.unique(found.keys))
