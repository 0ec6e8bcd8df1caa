"""The API reference has every public name, with an example that runs and a source."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.architecture.public_api import public_api

_EXTENSIONS = Path(__file__).parents[2] / "docs" / "_extensions"


@pytest.fixture(scope="module")
def generator() -> Iterator[ModuleType]:
    """The part of the generator that needs no Sphinx."""
    sys.path.insert(0, str(_EXTENSIONS))
    import api_pages

    yield api_pages
    sys.path.remove(str(_EXTENSIONS))


@pytest.fixture(scope="module")
def pages(generator: ModuleType) -> dict[str, str]:
    return generator.Reference("https://host/code", lambda name: []).pages()


def missing_names(pages: dict[str, str], listing: str) -> list[str]:
    """Returns the names of a listing that no page documents, and modules that no table links."""
    text = "\n".join(pages.values())
    documented = {line.split()[1] for line in text.splitlines() if line.startswith(":canonical: ")}
    # What a table or a list links: "{py:mod}`sg.input <stratagem.input>`".
    linked = {part.split(" <")[0] for part in text.split("}`")[1:]}
    classes: set[str] = set()
    missing: list[str] = []
    for line in listing.splitlines():
        name = line.split(" ")[0].split("(")[0]
        holder, _, last = name.rpartition(".")
        if line.startswith(f"{name} (class"):
            classes.add(name)
        if holder in classes:
            page = pages.get(holder.removeprefix("sg.").replace(".", "/"), "")
            found = last == "__init__" or f"`{last} <" in page
            found = found or f":canonical: {name}\n" in page
        else:
            found = name in (linked if line.endswith("(module)") else documented)
        missing += [] if found else [name]
    return missing


def test_every_public_name_has_its_place(pages: dict[str, str]) -> None:
    assert missing_names(pages, public_api()) == []


def test_name_without_a_page_is_found() -> None:
    pages = {
        "A": "# sg.A\n:canonical: sg.A\n:canonical: sg.A.run\n",
        "index": "{py:mod}`sg.b <stratagem.b>`",
    }
    listing = "sg.A (class)\nsg.A.run(self)\nsg.A.stop(self)\nsg.b (module)\nsg.c(x)\n"
    assert missing_names(pages, listing) == ["sg.A.stop", "sg.c"]


def test_every_public_object_has_an_example_and_a_source(generator: ModuleType) -> None:
    entries = [one for one in generator.entries() if one.kind in ("class", "exception", "function")]
    assert len(entries) > 200
    assert [fault for entry in entries for fault in generator.lacking(entry)] == []


def _without_anything() -> None:
    """Does nothing."""


def _with_example_that_is_shown_only() -> None:
    """Does nothing.

    Example::

        f()

    Source: specific to Stratagem.
    """


def _with_example_that_is_skipped() -> None:
    """Does nothing.

    Example:
        >>> f()  # doctest: +SKIP

    Source: specific to Stratagem.
    """


def _without_source() -> None:
    """Does nothing.

    Example:
        >>> f()
    """


class _Complete:
    """Does nothing.

    Example:
        >>> f()

    Source: specific to Stratagem.
    """


class _Inheriting(_Complete):
    pass


@pytest.mark.parametrize(
    ("value", "faults"),
    [
        (_without_anything, ["sg.f has no runnable example", "sg.f names no source"]),
        (_with_example_that_is_shown_only, ["sg.f has no runnable example"]),
        (_with_example_that_is_skipped, ["sg.f has no runnable example"]),
        (_without_source, ["sg.f names no source"]),
        (_Complete, []),
        (_Inheriting, ["sg.f has no runnable example", "sg.f names no source"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_lacking_parts_are_found(generator: ModuleType, value: Any, faults: list[str]) -> None:
    assert generator.lacking(generator.Entry(value, "sg.f")) == faults


def test_other_spellings_have_no_page(pages: dict[str, str]) -> None:
    assert "DistributedDataset" in pages
    assert "input/DistributedDataset" not in pages
    assert "coordinator/options" in pages
    assert "coordinator/CoordinatorOptions" not in pages
    assert (
        "{py:obj}`sg.coordinator.options <stratagem.coordinator.options>`"
        in (pages["coordinator/index"])
    )


def test_pages_differ_by_more_than_case(pages: dict[str, str]) -> None:
    assert len({name.lower() for name in pages}) == len(pages)


def test_class_page_shows_types_and_place(pages: dict[str, str]) -> None:
    page = pages["ClusterSpec"]
    assert "ClusterSpec(cluster: Mapping[str, ~typing.Any] | ClusterDef | ClusterSpec)" in page
    assert "](https://host/code/blob/main/src/stratagem/cluster/spec.py#L" in page
    assert "Full name: `stratagem.ClusterSpec`." in page


TABLE = """
[[symbol]]
name = "tf.compat.v1.distribute.MirroredStrategy"
here = "sg.MirroredStrategy"
status = "renamed"
difference = ""

[[symbol]]
name = "tf.distribute.MirroredStrategy"
here = "sg.MirroredStrategy"
status = "changed"
difference = "Takes `layout_map`."

[[symbol]]
name = "hvd.barrier"
here = "sg.collectives.host.barrier"
status = "same"
difference = ""
"""


def test_box_shows_what_differs_from_tensorflow(generator: ModuleType, tmp_path: Path) -> None:
    table = tmp_path / "symbols.toml"
    table.write_text(TABLE)
    pages = generator.Reference("", generator.read_migration(table)).pages()
    assert (
        ":::{admonition} TensorFlow: `tf.distribute.MirroredStrategy`\n:class: tip\n\n"
        "Changed. Takes `layout_map`.\n\n"
        "- `tf.compat.v1.distribute.MirroredStrategy`: Renamed, with the same arguments.\n:::"
    ) in pages["MirroredStrategy"]
    assert "Other libraries: `hvd.barrier`" in pages["collectives/host/index"]
    assert "admonition" not in pages["OneDeviceStrategy"]


def test_boxes_are_of_the_table_of_this_library(generator: ModuleType) -> None:
    rows = generator.read_migration()("sg.MirroredStrategy")
    assert rows[0]["name"] == "tf.distribute.MirroredStrategy"


def test_pages_of_names_that_are_gone_are_removed(generator: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "Gone.md").write_text("# sg.Gone")
    written = generator.write_pages(tmp_path, "https://host/code")
    assert set(tmp_path.rglob("*.md")) == set(written)


DOCSTRING = """Adds 2 * x < 3, see `a * b`.

- one
  line
- two

Args:
    *names: names such as
        `a`.
    size: a [size].

Example:
    >>> 1
    1

Source: TF 2.21
x.py."""


def test_docstring_becomes_markdown(generator: ModuleType) -> None:
    text = generator.api_markdown.markdown(DOCSTRING)
    assert text == (
        "Adds 2 \\* x \\< 3, see `a * b`.\n\n- one line\n- two\n\n"
        "**Arguments**\n\n- `*names`: names such as `a`.\n- `size`: a \\[size\\].\n\n"
        "**Example**\n\n```pycon\n>>> 1\n1\n```\n\n**Source:** TF 2.21 x.py."
    )
