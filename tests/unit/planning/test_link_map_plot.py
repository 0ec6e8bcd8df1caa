"""Picture of a map of links."""

from __future__ import annotations

import pytest

import stratagem as sg
from stratagem import environment as optional_libraries
from stratagem.planning import link_map
from stratagem.planning.link_map import LINK_METHODS, link_map_figure

TARGET = sg.planning.parse_target("16xH100")


def test_picture_names_the_methods_that_are_chosen(tmp_path) -> None:
    found = link_map([(4096, 4096), (4096,)], TARGET, 0.1)
    (axes,) = link_map_figure(found).axes
    named = [text.get_text() for text in axes.get_legend().get_texts()]
    assert named == [LINK_METHODS[place].name for place in sorted(set(found.choices.flat))]
    assert len(named) > 3
    assert "16xH100" in axes.get_title(loc="left")
    found.draw(tmp_path / "new" / "map.png")
    assert (tmp_path / "new" / "map.png").read_bytes().startswith(b"\x89PNG")


def test_map_of_one_line_is_drawn_without_lines() -> None:
    found = link_map([(64, 64)], TARGET, 0.1, latencies_s=[1e-3])
    (axes,) = link_map_figure(found).axes
    assert len(axes.collections) == 1


def test_picture_without_matplotlib(monkeypatch, tmp_path) -> None:
    def missing(name: str):
        raise ModuleNotFoundError(f"No module named {name!r}")

    found = link_map([(64, 64)], TARGET, 0.1)
    monkeypatch.setattr(optional_libraries.importlib, "import_module", missing)
    with pytest.raises(ImportError, match="Drawing a map of links needs matplotlib"):
        found.draw(tmp_path / "map.png")
