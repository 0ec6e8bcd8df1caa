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
_SAME = re.compile(r"^Same name: (.*?)\.$", re.MULTILINE | re.DOTALL)
# Names of TensorFlow 1 that the page replaces as it does those of TensorFlow 2.
_OLDER = {
    "tf.estimator.": "tf.compat.v1.train.",
    "tf.summary.": "tf.compat.v1.summary.",
}
# Dotted names of these may stand in a note; `sklearn` is what the tests have.
_ROOTS = {"sg": sg, "keras": keras, "jax": jax, "sklearn": importlib.import_module("sklearn")}


def _rows() -> list[tuple[list[str], str | None, str]]:
    page = _PAGE.partition("## From TensorFlow")[2]
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    rows = [(line, _ROW.match(line)) for line in lines]
    assert all(row for _, row in rows), [line for line, row in rows if not row]
    found = [
        (
            _CODE.findall(row["names"]),
            None if row["ours"] == "none" else row["ours"].strip("`"),
            row["note"],
        )
        for _, row in rows
        if row is not None
    ]
    same = [name for names in _SAME.findall(page) for name in _CODE.findall(names) if "." in name]
    found += [([name], "sg" + name.removeprefix("tf"), "") for name in same]
    return [(names + _older(names), ours, note) for names, ours, note in found]


def _older(names: list[str]) -> list[str]:
    older = [
        new + name.removeprefix(old)
        for name in names
        for old, new in _OLDER.items()
        if name.startswith(old)
    ]
    return [name for name in older if name in SYMBOLS and f"`{name}`" not in _PAGE]


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
