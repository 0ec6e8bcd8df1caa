"""Heat maps: their numbers and names, and a file that is a picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratagem.cli.doctor.cluster_command import draw, figure_of
from stratagem.cli.doctor.network.survey import Survey, SurveyedHost

pytest.importorskip("matplotlib")


def _survey(size: int) -> Survey:
    survey = Survey([SurveyedHost(f"h{i}", f"h{i}") for i in range(size)])
    survey.bytes_per_s[0][1], survey.round_trip_s[1][0] = 2e9, 5e-4
    return survey


def test_cells_have_numbers_and_missing_ones_say_so() -> None:
    bandwidth, trips = figure_of(_survey(2)).axes
    assert [text.get_text() for text in bandwidth.texts] == ["", "2000", "no\nconnection", ""]
    assert [text.get_text() for text in trips.texts] == ["", "no\nconnection", "0.5", ""]
    assert [label.get_text() for label in bandwidth.get_xticklabels()] == ["h0", "h1"]


def test_many_hosts_have_a_scale_in_place_of_numbers() -> None:
    axes = figure_of(_survey(13)).axes
    assert len(axes) == 4
    assert not axes[0].texts


def test_file_is_written_in_a_new_folder(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cluster.png"
    draw(_survey(2), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="xyz"):
        draw(_survey(2), tmp_path / "cluster.xyz")
