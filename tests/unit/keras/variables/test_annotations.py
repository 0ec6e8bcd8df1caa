"""Annotations of new variables: of a block, of its thread, and gone after an error."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any

import pytest

from stratagem.keras.variables import annotations

REFERENCE = object()
CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any], Any, Any]] = {
    "table": (annotations.making_table, annotations.is_making_table, True, False),
    "metric": (
        annotations.making_state_of_metric,
        annotations.is_making_state_of_metric,
        True,
        False,
    ),
    "worker": (annotations.making_worker_local, annotations.is_making_worker_local, True, False),
    "slot": (
        functools.partial(annotations.making_slot_of, REFERENCE),
        annotations.owner_of_new_slot,
        REFERENCE,
        None,
    ),
    "strings": (
        functools.partial(
            annotations.annotated_variables, synchronization="on_read", aggregation="sum"
        ),
        annotations.current_annotations,
        ("on_read", "sum"),
        None,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_annotation_holds_within_its_block_and_thread(name) -> None:
    block, current, inside, outside = CASES[name]
    assert current() == outside
    with block():
        with block():
            assert current() == inside
        assert current() == inside, "the outer block goes on"
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            assert threads.submit(current).result() == outside
        others = {other for other in CASES if other != name}
        assert all(CASES[other][1]() == CASES[other][3] for other in others)
    assert current() == outside


@pytest.mark.parametrize("name", CASES)
def test_annotation_ends_with_an_error(name) -> None:
    block, current, _, outside = CASES[name]
    with pytest.raises(KeyError), block():
        raise KeyError
    assert current() == outside
