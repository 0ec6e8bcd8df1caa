"""A model function as its author wrote it: which arguments it takes, and what it has to return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from stratagem.estimator.spec import EstimatorSpec
from stratagem.messages import explain

__all__ = ["ModelFunction", "arguments_of"]

_KNOWN = ("features", "labels", "mode", "params", "config")


class ModelFunction:
    """Calls a model function with those of the arguments that it takes, by name.

    Args:
        function: takes `features` and any of `labels`, `mode`, `params`, `config`.
        params: the parameters, or None.
        config: the `RunConfig`.

    Raises:
        ValueError: it is missing, has no `features`, takes an argument of another name, or does not
            take the params that are given.

    Source: tensorflow/estimator estimator.py, _verify_model_fn_args.
    """

    def __init__(self, function: Any, params: Mapping[str, Any] | None, config: Any) -> None:
        if not callable(function):
            raise ValueError(
                explain(
                    f"model_fn={function!r} cannot be called.",
                    expected="a function of features, labels, mode, params and config.",
                    fix="pass the function itself.",
                )
            )
        self.function = function
        self._takes = arguments_of(function)
        self._check(params)
        self._params = params
        self._config = config

    def _check(self, params: Any) -> None:
        if "features" not in self._takes:
            raise ValueError(
                explain(
                    f"model_fn takes {list(self._takes)}, and no features.",
                    expected="`features` among its arguments.",
                    fix="write def model_fn(features, labels, mode, params).",
                )
            )
        if params is not None and "params" not in self._takes:
            raise ValueError(
                explain(
                    f"params={params!r} are given, and model_fn does not take them.",
                    expected="`params` among its arguments.",
                    fix="write def model_fn(features, labels, mode, params), or leave params out.",
                )
            )
        unknown = [name for name in self._takes if name not in _KNOWN]
        if unknown:
            raise ValueError(
                explain(
                    f"model_fn takes {unknown}, which nobody passes.",
                    expected=f"arguments among {list(_KNOWN)}.",
                    fix="give others a value with functools.partial, or put them into params.",
                )
            )

    @property
    def gives_values(self) -> bool:
        """Whether its scaffolds give all variables values that need no training."""
        return bool(getattr(self.function, "gives_values", False))

    @property
    def takes_labels(self) -> bool:
        """Whether it has an argument for labels."""
        return "labels" in self._takes

    def __call__(self, features: Any, labels: Any, mode: str) -> EstimatorSpec:
        """Calls it.

        Args:
            features: as input_fn gives them.
            labels: likewise; None where there are none.
            mode: one of `ModeKeys`.

        Raises:
            ValueError: labels that it does not take, or another result than an `EstimatorSpec`.
        """
        if labels is not None and not self.takes_labels:
            raise ValueError(
                explain(
                    "input_fn returns labels, and model_fn does not take them.",
                    expected="`labels` among its arguments, or an input_fn that returns features "
                    "alone.",
                    fix="write def model_fn(features, labels, mode).",
                )
            )
        known = {
            "features": features,
            "labels": labels,
            "mode": mode,
            "params": self._params,
            "config": self._config,
        }
        spec = self.function(**{name: known[name] for name in self._takes})
        if not isinstance(spec, EstimatorSpec):
            raise ValueError(
                explain(
                    f"model_fn returned {spec!r} of type {type(spec).__name__}.",
                    expected="an sg.estimator.EstimatorSpec.",
                    fix="end each branch with return sg.estimator.EstimatorSpec(mode, ...).",
                )
            )
        return spec


def arguments_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of the arguments that a function can be given by name.

    What `functools.partial` has given already is left out.

    Args:
        function: any callable.
    """
    given = getattr(function, "keywords", {})
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(one.name for one in parameters if one.kind in kinds and one.name not in given)
