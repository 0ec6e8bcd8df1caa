"""Errors of input workers, as their consumers get them."""

from __future__ import annotations

import pytest

import stratagem as sg
from stratagem.errors import PoisonExampleError, UnavailableError
from stratagem.input.service.consumer import describe_open_error, describe_read_error, job_error
from stratagem.input.service.splits import ShardingPolicy, facts_of, plan_splits


def _fail() -> None:
    raise KeyError("label")


def _caught() -> KeyError:
    try:
        _fail()
    except KeyError as error:
        return error
    raise AssertionError


def test_the_file_the_function_and_the_line_are_named() -> None:
    source = sg.input.Dataset.from_files(["a", "b"], lambda files: []).as_source()
    plan = plan_splits(facts_of(source), ShardingPolicy.DYNAMIC, None)
    described = describe_read_error(_caught(), source, plan, epoch=2, split=1, index=5)
    assert (described["file"], described["function"]) == ("b", "_fail")
    error = job_error(described)
    assert isinstance(error, PoisonExampleError)
    line = _fail.__code__.co_firstlineno + 1
    words = (
        rf"could not read batch 5 of the file b in epoch 2: _fail \(.*test_read_errors.py, "
        rf"line {line}\) raised KeyError: 'label'"
    )
    with pytest.raises(PoisonExampleError, match=words):
        raise error


def test_without_files_the_split_is_named() -> None:
    source = sg.input.Dataset([1, 2]).as_source()
    plan = plan_splits(facts_of(source), ShardingPolicy.DYNAMIC, None)
    described = describe_read_error(_caught(), source, plan, epoch=0, split=1, index=0)
    with pytest.raises(PoisonExampleError, match="could not read batch 0 of split 1"):
        raise job_error(described)


def test_other_errors_of_a_job() -> None:
    with pytest.raises(UnavailableError, match="split 3 were lost 8 times in a row"):
        raise job_error({"kind": "losses", "split": 3, "count": 8})
    with pytest.raises(UnavailableError, match="cannot write its journal: disk full"):
        raise job_error({"kind": "journal", "text": "disk full"})
    with pytest.raises(RuntimeError, match="could not load the dataset: KeyError: 'label'"):
        raise job_error(describe_open_error(_caught()))
