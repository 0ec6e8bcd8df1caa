"""Programs in the manner of keras.io's examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from validation.third_party.comparison import Numbers, assert_like_plain_keras
from validation.third_party.programs.keras_examples import PROGRAMS


@pytest.mark.parametrize("name", PROGRAMS)
def test_example_of_keras_equals_plain_keras(
    strategy: Any, plain: Mapping[str, Numbers], name: str
) -> None:
    assert_like_plain_keras(PROGRAMS[name], strategy, plain[name])
