"""Strict YAML parsing, as in Kubernetes."""

from __future__ import annotations

import re
import sys

import pytest

from stratagem.cli.manifests.custom_resources import (
    Problem,
    document_name,
    metadata_name,
    parse_documents,
)


def test_empty_documents_are_left_out() -> None:
    documents, problems = parse_documents("---\na: 1\n---\n# nothing\n---\nb: {c: [1, 2]}\n")
    assert documents == [{"a": 1}, {"b": {"c": [1, 2]}}]
    assert problems == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", "YAML: duplicate key 'a' in .* line 2, column 1"),
        ("a:\n- b: 1\n  c: 2\n  b: 3\n", "duplicate key 'b' in .* line 4"),
        ("a: [1", "YAML: .* line 1"),
        ("a: \x07", "YAML: "),
        ("- 1", "document 1: a list, not a mapping"),
        ("a: 1\n---\ntext", "document 2: a str, not a mapping"),
        ("", "YAML: it contains no document"),
        ("---\n---\n", "YAML: it contains no document"),
        ("!!python/object/apply:os.getcwd []", "YAML: could not determine a constructor"),
    ],
)
def test_problem_is_reported(text, message) -> None:
    _, (problem,) = parse_documents(text)
    assert problem.path == ""
    assert re.search(message, str(problem))


def test_documents_before_the_mistake_are_kept() -> None:
    documents, problems = parse_documents("a: 1\n---\nb: [")
    assert documents == [{"a": 1}]
    assert len(problems) == 1


def test_keys_of_different_mappings_may_be_the_same() -> None:
    documents, problems = parse_documents("a: &x {b: 1}\nc: {b: 1}\nd: *x\n1: 2\n")
    assert documents == [{"a": {"b": 1}, "c": {"b": 1}, "d": {"b": 1}, 1: 2}]
    assert problems == []


@pytest.mark.parametrize(
    ("document", "name", "called"),
    [
        ({"kind": "Job", "metadata": {"name": "a"}}, "a", "Job/a"),
        ({"kind": "Job"}, "", "Job/(no name)"),
        ({"metadata": ["a"]}, "", "(no kind)/(no name)"),
        ({"kind": "Job", "metadata": {"name": 3}}, "", "Job/(no name)"),
    ],
)
def test_documents_are_called_by_kind_and_name(document, name, called) -> None:
    assert metadata_name(document) == name
    assert document_name(document) == called


def test_problem_is_one_line() -> None:
    assert str(Problem("Job/a", "spec", "wrong")) == "Job/a: spec: wrong"
    assert str(Problem("Job/a", "", "wrong")) == "Job/a: wrong"


def test_library_that_is_missing_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ImportError, match=r"Validating manifests needs yaml, which"):
        parse_documents("a: 1")
