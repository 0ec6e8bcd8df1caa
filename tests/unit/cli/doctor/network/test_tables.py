"""Tables of made-up surveys: directions, missing values, and what is left out."""

from __future__ import annotations

import io

from rich.console import Console

from stratagem.cli.doctor.network.survey import Survey, SurveyedHost, survey_tables


def _shown(survey: Survey) -> dict[str, list[list[str]]]:
    """Cells of each table, by its title."""
    found: dict[str, list[list[str]]] = {}
    for table in survey_tables(survey):
        console = Console(width=120, record=True, file=io.StringIO())
        console.print(table)
        lines = [line for line in console.export_text().splitlines() if line.startswith("│")]
        found[str(table.title)] = [
            [cell.strip() for cell in line.strip("│").split("│")] for line in lines
        ]
    return found


def _survey(size: int = 2) -> Survey:
    survey = Survey([SurveyedHost(f"h{i}", f"h{i}") for i in range(size)])
    for one in range(size):
        for other in range(size):
            survey.free[one][other] = ("reached", "10.0.0.1") if one != other else None
    return survey


def test_rows_send_and_columns_receive() -> None:
    survey = _survey()
    survey.bytes_per_s[0][1] = 2e9
    survey.round_trip_s[1][0] = 5e-4
    survey.offset_s, survey.uncertainty_s = [0.0, 0.25], [0.0, 1e-3]
    assert _shown(survey) == {
        "Bandwidth, MB/s": [["h0", "", "2000"], ["h1", "-", ""]],
        "Round trip, ms": [["h0", "", "-"], ["h1", "0.50", ""]],
        "Clocks": [["h1", "250.00", "1.00"]],
    }


def test_connections_are_shown_if_one_fails() -> None:
    survey = _survey()
    assert _shown(survey) == {}
    survey.free[0][1] = ("timeout", "10.0.0.1")
    assert _shown(survey) == {"Free port": [["h0", "", "timeout"], ["h1", "reached", ""]]}


def test_many_hosts_have_no_matrix() -> None:
    survey = _survey(13)
    survey.bytes_per_s[0][1] = 2e9
    survey.offset_s[:2] = [0.0, 0.0]
    assert list(_shown(survey)) == ["Clocks"]
    assert len(_shown(survey)["Clocks"]) == 12
