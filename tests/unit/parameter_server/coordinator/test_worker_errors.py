"""Errors of workers, as they are sent and as they are raised."""

from __future__ import annotations

import pickle

import pytest

from stratagem.errors import ClosureInputError, OutOfRangeError
from stratagem.parameter_server.client.variable_client import VariableOnWorkerError
from stratagem.parameter_server.coordinator.worker_errors import (
    DatasetVariableError,
    WorkerReport,
    failed_message,
    merge_reports,
)


def _sent(error: BaseException, *, is_input: bool = False) -> BaseException:
    return pickle.loads(failed_message(error, is_input=is_input).arrays[0].tobytes())


def test_reports_of_one_error_are_merged_and_addresses_do_not_count() -> None:
    first, same, other = (KeyError("a") for _ in range(3))
    WorkerReport(first, 2, "<f at 0x7f01>")
    WorkerReport(same, 0, "<f at 0x7f02>")
    WorkerReport(other, 1, "<g at 0x7f01>")
    for later in (same, other, ValueError("of no worker")):
        merge_reports(first, later)
    assert first.__notes__ == ["Raised on workers 0 and 2:\n<f at 0x7f01>"]
    merge_reports(ValueError("of no worker"), same)
    assert same.__notes__ == ["Raised on worker 0:\n<f at 0x7f02>"]


@pytest.mark.parametrize("error", [StopIteration(), StopAsyncIteration()])
def test_end_of_data_has_a_message(error) -> None:
    sent = _sent(error)
    assert type(sent) is OutOfRangeError
    assert f"raised {type(error).__name__}: its dataset is exhausted" in str(sent)


def test_only_variables_in_dataset_functions_are_value_errors() -> None:
    made = _sent(VariableOnWorkerError("a variable"), is_input=True)
    assert type(made) is DatasetVariableError
    assert isinstance(made, ValueError)
    assert isinstance(made, ClosureInputError)
    failed = _sent(OSError("no file"), is_input=True)
    assert type(failed) is ClosureInputError
    assert not isinstance(failed, ValueError)
