"""Exception classes: each derives from a builtin, and survives pickling."""

from __future__ import annotations

import pickle

import pytest

from stratagem import errors

BUILTINS = {
    "CancelledError": RuntimeError,
    "ClosureAbortedError": RuntimeError,
    "ClosureInputError": RuntimeError,
    "DataLossError": OSError,
    "DeadlineExceededError": TimeoutError,
    "InvalidArgumentError": ValueError,
    "NotFoundError": LookupError,
    "OutOfRangeError": IndexError,
    "PSUnavailableError": ConnectionError,
    "PoisonExampleError": RuntimeError,
    "ResourceExhaustedError": MemoryError,
    "UnavailableError": ConnectionError,
}


def test_all_errors_are_in_the_table() -> None:
    assert sorted(BUILTINS) == errors.__all__


@pytest.mark.parametrize("name", BUILTINS)
def test_error_is_also_the_builtin(name) -> None:
    with pytest.raises(BUILTINS[name], match="message of three lines"):
        raise getattr(errors, name)("message of three lines")


@pytest.mark.parametrize("name", BUILTINS)
def test_error_can_be_pickled(name) -> None:
    error = getattr(errors, name)("what was received\nExpected more\nFix: give more")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.args == error.args
