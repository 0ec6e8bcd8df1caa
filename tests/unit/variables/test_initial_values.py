"""Initial values of variables: compared between processes by their digests and shapes."""

from __future__ import annotations

import types
import zlib
from typing import Any

import numpy as np
import pytest

from stratagem.group.current import Identity
from stratagem.variables import initial_values
from stratagem.variables.initial_values import agree_on_initial_values, initial_digest

TOGETHER: Any = types.SimpleNamespace(spans_processes=True)
ALONE: Any = types.SimpleNamespace(spans_processes=False)


def variable(path: str, shape: tuple[int, ...] = (2,), digest: int = 1, dtype="float32") -> Any:
    return types.SimpleNamespace(
        path=path, shape=shape, dtype=dtype, initial_digest=digest, drop_initial=lambda: None
    )


class Group:
    """A group of two: this process is worker 0, and `first` is what the chief sent."""

    def __init__(self, first: list[Any]) -> None:
        self.identity = Identity(1, ("chief 0", "worker 0"), "h", 1)
        self.first = first

    def exchange(self, name: str, own: list[Any]) -> list[Any]:
        return [self.first, own]


class Registry:
    def __init__(self, *variables: Any) -> None:
        self.variables = list(variables)

    def take_unsettled(self) -> list[Any]:
        taken, self.variables = self.variables, []
        return taken


@pytest.fixture
def taken(monkeypatch) -> list[str]:
    """Paths of the variables whose values are taken from process 0."""
    paths: list[str] = []
    monkeypatch.setattr(initial_values, "is_in_parts", lambda variable, topology: False)
    monkeypatch.setattr(
        initial_values, "_take_first", lambda variable, held, topology: paths.append(variable.path)
    )
    return paths


def agree(monkeypatch, first: list[Any], *variables: Any) -> None:
    monkeypatch.setattr(initial_values, "current_group", lambda: Group(first))
    agree_on_initial_values(Registry(*variables), TOGETHER)  # pyright: ignore[reportArgumentType]


def test_only_values_with_other_digests_are_sent(monkeypatch, taken) -> None:
    first = [("a", [2], "float32", 1), ("b", [2], "float32", 9)]
    agree(monkeypatch, first, variable("a"), variable("b"))
    assert taken == ["b"]


def test_names_may_differ_between_processes(monkeypatch, taken) -> None:
    agree(monkeypatch, [("dense_7/kernel", [2], "float32", 1)], variable("dense/kernel"))
    assert taken == []


@pytest.mark.parametrize(
    "first", [("a", [3], "float32", 1), ("a", [2], "int32", 1)], ids=["shape", "dtype"]
)
def test_another_shape_or_dtype_is_an_error_before_values_are_sent(
    first, monkeypatch, taken
) -> None:
    with pytest.raises(RuntimeError, match=r"chief 0 created variable 'a' of shape .*worker 0"):
        agree(monkeypatch, [("z", [2], "float32", 0), first], variable("z"), variable("a"))
    assert taken == []


def test_processes_by_themselves_exchange_nothing(monkeypatch) -> None:
    monkeypatch.setattr(initial_values, "current_group", lambda: 1 / 0)
    registry = Registry(variable("a"))
    agree_on_initial_values(registry, ALONE)  # pyright: ignore[reportArgumentType]
    assert len(registry.variables) == 1


def test_digest_is_the_crc_of_the_bytes_in_row_order() -> None:
    value = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert initial_digest(value, TOGETHER) == zlib.crc32(value.tobytes())
    assert initial_digest(value.T, TOGETHER) == zlib.crc32(value.T.copy().tobytes())
    assert initial_digest(value, ALONE) == 0
