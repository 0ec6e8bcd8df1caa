"""Device that a block names for new variables of its thread."""

from __future__ import annotations

import concurrent.futures

import pytest

from stratagem.execution.context.explicit_device import explicit_device, naming_device


def test_innermost_block_counts_until_it_ends() -> None:
    assert explicit_device() is None
    with naming_device("cpu:0"):
        with naming_device("cpu:1"):
            assert explicit_device() == "cpu:1"
        assert explicit_device() == "cpu:0"
    assert explicit_device() is None


def test_block_that_an_error_leaves_ends_too() -> None:
    with pytest.raises(KeyError), naming_device("cpu:0"):
        raise KeyError
    assert explicit_device() is None


def test_other_threads_have_their_own_device() -> None:
    with naming_device("cpu:0"), concurrent.futures.ThreadPoolExecutor(1) as threads:
        assert threads.submit(explicit_device).result() is None
