"""Equal keys of a lookup, against NumPy's sorted sets and keys whose hashes collide."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from stratagem.parameter_server.client import distinct_rows as distinct_keys
from stratagem.parameter_server.client.distinct_rows import representatives

ANY_KEYS = arrays.arrays(
    np.int64,
    st.integers(0, 200),
    elements=st.integers(-(2**63), 2**63 - 1) | st.integers(-4, 4),
    fill=st.nothing(),
)


def check(keys: np.ndarray) -> None:
    found = representatives(keys)
    assert found.shape == keys.shape
    np.testing.assert_array_equal(keys[found], keys)
    assert len(np.unique(found)) == len(np.unique(keys))


@pytest.mark.slow
@given(ANY_KEYS)
def test_equal_keys_and_only_these_have_one_representative(keys) -> None:
    check(keys)


@pytest.mark.slow
@pytest.mark.parametrize("second", ["apart", "colliding"])
@given(ANY_KEYS)
def test_keys_with_equal_hashes_are_told_apart(second, keys) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distinct_keys, "_FIRST", np.uint64(0))
        if second == "colliding":
            patch.setattr(distinct_keys, "_SECOND", np.uint64(0))
        check(keys)


@pytest.mark.parametrize("step", [1, 2**11, 2**32, 2**52, 2**61])
def test_regular_keys(step) -> None:
    keys = np.arange(-5_000, 5_000, dtype=np.int64) * np.int64(step)
    check(np.concatenate([keys, keys[::3]]))


def test_strided_keys() -> None:
    check(np.arange(40, dtype=np.int64)[::-4])
