"""Sizes of decoders, and the names of cases."""

from __future__ import annotations

import dataclasses
import json

import pytest

from benchmarks.large_models.cases import CASES, DECODERS, Case, make_case


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [("7B", 6_738_415_616), ("8B", 8_030_261_248), ("70B", 70_553_706_496)],
)
def test_decoder_has_the_published_number_of_parameters(name: str, num_parameters: int) -> None:
    assert DECODERS[name].num_parameters == num_parameters


def test_equal_layers_have_67_million_parameters() -> None:
    assert DECODERS["6 layers"].num_layer_parameters == pytest.approx(67e6, rel=0.01)


def test_each_case_has_a_file_of_its_own() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert all(set(name).isdisjoint(" :=/") for name in names)


def test_case_is_passed_on_as_json() -> None:
    case = Case("6 layers", "v5e:2x4", "JAX", "mixed_bfloat16", recomputes=False)
    assert make_case(json.loads(case.as_json())) == case


@pytest.mark.parametrize("field", ["decoder", "side"])
def test_unknown_name_is_an_error_that_lists_the_known(field: str) -> None:
    fields = dataclasses.asdict(CASES[0]) | {field: "other"}
    with pytest.raises(ValueError, match=r"'other'.*there are the decoders.*ModelParallel"):
        make_case(fields)
