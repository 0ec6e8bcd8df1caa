"""Settings that a program can change."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator

import pytest

from stratagem import config
from tests.fresh_process import run_fresh


@pytest.fixture
def eager() -> Iterator[None]:
    config.run_eagerly(True)
    yield
    config.run_eagerly(False)


def test_replica_functions_are_compiled_by_default() -> None:
    assert not config.runs_eagerly()


def test_run_eagerly_can_be_switched_on_and_off() -> None:
    config.run_eagerly(True)
    assert config.runs_eagerly() is True
    config.run_eagerly(False)
    assert config.runs_eagerly() is False


def test_run_eagerly_holds_for_one_thread(eager) -> None:
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as executor:
        assert executor.submit(config.runs_eagerly).result() is False
    assert config.runs_eagerly() is True


@pytest.mark.parametrize("enabled", [None, 1, "true"])
def test_run_eagerly_takes_only_a_bool(enabled) -> None:
    kind = type(enabled).__name__
    with pytest.raises(
        TypeError, match=f"enabled={enabled!r} is of type {kind}(?s:.)*True or False"
    ):
        config.run_eagerly(enabled)


def test_unknown_setting_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'run_greedily'"):
        _ = config.run_greedily
    with pytest.raises(AttributeError, match="has no attribute 'peer_timeout_s'"):
        _ = config.peer_timeout_s


def test_run_eagerly_starts_from_the_environment() -> None:
    program = "from stratagem import config; print(config.runs_eagerly())"
    assert run_fresh(program, STRATAGEM_RUN_EAGERLY="1") == ["True"]
