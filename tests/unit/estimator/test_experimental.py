"""Names of `tf.estimator.experimental` that are offered, each the function of early stopping."""

from __future__ import annotations

import stratagem as sg
from stratagem.estimator import experimental
from stratagem.estimator.tasks import early_stopping


def test_names_are_those_of_tensorflow_and_lead_to_early_stopping() -> None:
    assert sg.estimator.experimental is experimental
    assert set(experimental.__all__) == {
        "make_early_stopping_hook",
        "stop_if_higher_hook",
        "stop_if_lower_hook",
        "stop_if_no_decrease_hook",
        "stop_if_no_increase_hook",
    }
    for name in experimental.__all__:
        assert getattr(experimental, name) is getattr(early_stopping, name)
