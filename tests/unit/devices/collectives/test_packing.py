"""Packing of arrays into messages."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.devices.collectives.measurement import SIZES_BYTES
from stratagem.devices.collectives.packing import (
    NO_PACKING,
    WITHIN_PROCESS,
    NumberedPacks,
    SizedPacks,
    packing_for,
)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 100), st.sampled_from("fi")), max_size=30),
    st.integers(1, 120),
    st.integers(1, 200),
)
def test_every_array_travels_once_and_no_pack_is_too_large(arrays, max_array, pack) -> None:
    sizes, kinds = [size for size, _ in arrays], [kind for _, kind in arrays]
    packs = SizedPacks(max_array, pack).packs(sizes, kinds)
    assert sorted(place for places in packs for place in places) == list(range(len(arrays)))
    for places in packs:
        assert len({kinds[place] for place in places}) == 1
        if len(places) > 1:
            assert all(sizes[place] <= max_array for place in places)
            assert sum(sizes[place] for place in places) <= pack


def test_many_small_arrays_of_a_kind_are_sent_alone() -> None:
    packing = SizedPacks(max_array_bytes=10, pack_bytes=100, max_num_arrays=2)
    sizes, kinds = [1, 2, 3, 4, 50, 5], ["f", "f", "i", "f", "i", "i"]
    assert sorted(packing.packs(sizes, kinds)) == [[0], [1], [2, 5], [3], [4]]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 100), st.sampled_from("fi")), max_size=30), st.integers(1, 5)
)
def test_numbered_packs_hold_neighbours_and_are_of_about_one_size(arrays, num_packs) -> None:
    sizes, kinds = [size for size, _ in arrays], [kind for _, kind in arrays]
    packs = NumberedPacks(num_packs).packs(sizes, kinds)
    assert sorted(place for places in packs for place in places) == list(range(len(arrays)))
    for kind in set(kinds):
        of_kind = [places for places in packs if kinds[places[0]] == kind]
        assert len(of_kind) <= num_packs
        assert [place for places in of_kind for place in places] == [
            place for place, other in enumerate(kinds) if other == kind
        ]
        share = sum(size for size, other in arrays if other == kind) / num_packs
        largest = max(size for size, other in arrays if other == kind)
        assert all(sum(sizes[place] for place in places) <= share + largest for places in of_kind)


@pytest.mark.parametrize(("packing", "count"), [(NO_PACKING, 4), (WITHIN_PROCESS, 2)])
def test_rules_in_use(packing, count) -> None:
    sizes = [4, 2**16, 8, 2**20]
    assert len(packing.packs(sizes, ["float32"] * 4)) == count


def test_choice_follows_the_platform_the_processes_and_the_option() -> None:
    assert packing_for("gpu", spans_processes=True, bytes_per_pack=100) == NO_PACKING
    assert packing_for("cpu", spans_processes=False, bytes_per_pack=100) == WITHIN_PROCESS
    assert packing_for("cpu", spans_processes=True, bytes_per_pack=100) == SizedPacks(100, 100)
    chosen = packing_for("cpu", spans_processes=True, bytes_per_pack=0)
    assert 2**16 < chosen.pack_bytes < 2**20


@pytest.mark.parametrize(
    ("latency_s", "byte_s", "expected"),
    [
        (1e-3, 1.7e-9, 2**18),  # loopback, where a sum takes its processors' time
        (5e-4, 8e-9, 2**18),  # 1 Gbit/s
        (5e-4, 8e-8, 2**18),  # 100 Mbit/s
        (0.1, 8e-9, 2**24),  # 1 Gbit/s, 50 ms
        (0.004, 8e-9, 2**24),
    ],
)
def test_packs_are_large_where_a_message_takes_long_by_itself(latency_s, byte_s, expected) -> None:
    times_s = {size: latency_s + byte_s * size for size in SIZES_BYTES}
    packing = packing_for("cpu", spans_processes=True, bytes_per_pack=0, times_s=times_s)
    assert packing == SizedPacks(expected, expected)
    asked = packing_for("cpu", spans_processes=True, bytes_per_pack=100, times_s=times_s)
    assert asked == SizedPacks(100, 100)
