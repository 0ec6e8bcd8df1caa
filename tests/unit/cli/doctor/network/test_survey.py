"""A survey as JSON and back."""

from __future__ import annotations

import json

from stratagem.cli.doctor.network.survey import Survey, SurveyedHost, square


def test_json_has_all_of_a_survey() -> None:
    survey = Survey([SurveyedHost("a", "a", 1), SurveyedHost("b", "b", 2)], absent={1: "is away"})
    survey.facts[0] = {"versions": {"jax": "1"}}
    survey.free[0][1] = ("reached", "10.0.0.2")
    survey.bytes_per_s[0][1] = 1e9
    survey.owned[0] = {"10.0.0.1": True}
    survey.own_address[0] = "10.0.0.1"
    assert Survey.from_dict(json.loads(json.dumps(survey.as_dict()))) == survey


def test_rows_of_a_square_are_apart() -> None:
    matrix = square(2)
    matrix[0][1] = 1.0
    assert matrix == [[None, 1.0], [None, None]]
