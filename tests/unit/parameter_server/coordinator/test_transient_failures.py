"""Which failures to reach a server are tolerated."""

from __future__ import annotations

import pytest

from stratagem.errors import PSUnavailableError
from stratagem.parameter_server.coordinator.coordinated_workers import TransientFailures

LOST = PSUnavailableError("server 0 is silent")


def test_success_forgets_what_was_before() -> None:
    failures = TransientFailures(2)

    def is_tolerated() -> bool:
        with pytest.warns(
            RuntimeWarning, match="in a row; retrying the function: server 0 is silent"
        ):
            return failures.is_tolerated(LOST)

    assert is_tolerated()
    failures.note_success()
    assert is_tolerated()
    assert is_tolerated()
    assert not failures.is_tolerated(LOST)  # and no warning


def test_other_errors_are_never_tolerated() -> None:
    failures = TransientFailures(5)
    assert not failures.is_tolerated(ValueError("wrong"))
    assert not failures.is_tolerated(ConnectionError("of the user's own"))


def test_none_is_tolerated_unless_it_was_asked_for() -> None:
    assert not TransientFailures(0).is_tolerated(LOST)
