"""The hash of keys, against the published generator and plain integers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stratagem.parameter_server.server.key_hash import mix64

# Outputs of the generator from seed 0, https://prng.di.unimi.it/splitmix64.c
SPLITMIX64 = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)


def test_published_outputs() -> None:
    gamma = np.uint64(0x9E3779B97F4A7C15)
    states = np.arange(1, 4, dtype=np.uint64) * gamma
    assert tuple(mix64(states).tolist()) == SPLITMIX64


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_hash_of_each_key(keys) -> None:
    def mixed(key: int) -> int:
        value = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    given = np.array(keys, np.uint64)
    assert mix64(given).tolist() == [mixed(key) for key in keys]
    assert given.tolist() == keys  # unchanged
