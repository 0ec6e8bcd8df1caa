"""The prose lint finds what it is for, and nothing in plain text."""

from __future__ import annotations

import pytest

from tests import prose


@pytest.mark.parametrize("opening", prose.OPENINGS)
def test_opening_of_a_docstring_is_found(opening) -> None:
    assert prose.check_source("x.py", f'"""{opening} a thing is."""\n')


@pytest.mark.parametrize("phrase", prose.PHRASES)
def test_worn_phrase_is_found_in_docstrings_comments_and_pages(phrase) -> None:
    assert prose.check_source("x.py", f'"""A store, {phrase} it."""\n')
    assert prose.check_source("x.py", f"# A store, {phrase} it.\n")
    assert prose.check_page("x.md", f"A store, {phrase} it.\n")


def test_plain_text_code_and_tables_pass() -> None:
    assert prose.check_source("x.py", '"""Store of a variable."""\nx = "nobody"\n') == []
    page = "A store of variables.\n\n```\nnobody\n```\n\n| nobody |\n\nUse `nobody`.\n"
    assert prose.check_page("x.md", page) == []


def test_long_sentences_are_found_by_their_mean() -> None:
    (violation,) = prose.check_page("x.md", " ".join(["word"] * 25) + ".\n")
    assert violation == "x.md: 25.0 words a sentence on average, at most 20"
    assert prose.check_page("x.md", "One short sentence is here. Another one follows it.\n") == []


def test_list_items_are_sentences() -> None:
    page = "- a first item\n- a second item\n\n1. a third\n"
    assert [text for _, text in prose.sentences(page)] == [
        "a first item",
        "a second item",
        "a third",
    ]


def test_directives_are_no_sentences() -> None:
    page = ":::{card} Start\n:link: start/index\nInstall it.\n:::\n"
    assert [text for _, text in prose.sentences(page)] == ["Install it."]
