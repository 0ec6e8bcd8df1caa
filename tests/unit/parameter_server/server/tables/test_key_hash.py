"""Mixed bits of keys, against MurmurHash3 in Python integers."""

from __future__ import annotations

import numpy as np

from stratagem.parameter_server.server.tables.row_formats import mix64, seeded
from tests.unit.parameter_server.server.tables.scalar_hash import KEYS, mixed, seeded_key


def test_numbers_are_mixed_as_murmurhash_does() -> None:
    numbers = [0, 1, 2**63, 2**64 - 1, 0x0123456789ABCDEF]
    got = mix64(np.array(numbers, np.uint64))
    assert [*map(int, got)] == [*map(mixed, numbers)]
    assert int(got[1]) == 0xB456BCFC34C2CB2C  # fmix64(1) of the reference implementation


def test_seed_changes_the_bits_of_a_key() -> None:
    keys = np.array(KEYS, np.int64)
    for seed in (0, 1, 2**63 - 1):
        assert [*map(int, seeded(keys, seed))] == [seeded_key(key, seed) for key in KEYS]
    assert (seeded(keys, 0) != seeded(keys, 1)).all()


def test_each_bit_of_the_input_changes_half_of_the_output() -> None:
    numbers = np.random.default_rng(0).integers(0, 2**63, 2000).astype(np.uint64)
    for bit in range(64):
        changed = mix64(numbers) ^ mix64(numbers ^ np.uint64(1 << bit))
        assert abs(np.bitwise_count(changed).mean() - 32) < 0.6  # 6 deviations of the mean
