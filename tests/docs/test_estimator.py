"""The page about Estimators has every name of TensorFlow, and the names of ours in it exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import jax
import keras

import stratagem as sg
from tests.unit.estimator.tensorflow_symbols import SYMBOLS

_FOLDER = Path(__file__).parents[2] / "docs" / "guides"
_PAGE = (_FOLDER / "estimator.md").read_text(encoding="utf-8")
_ROW = re.compile(r"^\| (?P<names>`tf\..*?) \| (?P<ours>none|`sg\.[\w.]+`) \| (?P<note>.*?) ?\|$")
_CODE = re.compile(r"`([^`]+)`")
# Dotted names of these may stand in a note; `sklearn` is what the tests have.
_ROOTS = {"sg": sg, "keras": keras, "jax": jax, "sklearn": importlib.import_module("sklearn")}


def _rows() -> list[tuple[list[str], str | None, str]]:
    lines = _PAGE.partition("## From TensorFlow")[2].splitlines()
    rows = [_ROW.match(line) for line in lines if line.startswith("| `")]
    assert all(rows), [line for line, row in zip(lines, rows, strict=False) if not row]
    return [
        (
            _CODE.findall(row["names"]),
            None if row["ours"] == "none" else row["ours"].strip("`"),
            row["note"],
        )
        for row in rows
        if row is not None
    ]


ROWS = _rows()


def _resolved(name: str) -> Any:
    found: Any = _ROOTS[name.partition(".")[0]]
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    return found


def test_page_has_every_name_of_tensorflow_once() -> None:
    names = [name for names, _, _ in ROWS for name in names]
    assert sorted(names) == sorted(SYMBOLS)
    assert len(set(SYMBOLS)) == len(SYMBOLS)


def test_names_of_ours_exist() -> None:
    for _, ours, _ in ROWS:
        if ours is not None:
            assert _resolved(ours) is not None


def test_what_is_missing_has_a_way_out() -> None:
    """A note names it; dotted names in notes exist."""
    for names, ours, note in ROWS:
        code = _CODE.findall(note)
        assert ours is not None or code, f"{names} has no way out"
        for name in code:
            match = re.match(r"(sg|keras|jax|sklearn)(\.\w+)+$", name)
            if match:
                _resolved(name)


def test_links_lead_to_files() -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", _PAGE)
    assert targets
    assert [target for target in targets if not (_FOLDER / target).exists()] == []
