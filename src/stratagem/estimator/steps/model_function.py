"""Validated calls of a user's model function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from stratagem.errors import explain
from stratagem.estimator.spec import EstimatorSpec

_KNOWN = ("features", "labels", "mode", "params", "config")


class ModelFunction:
    """Calls a model function with the arguments it takes, by name."""

    def __init__(
        self, function: Callable[..., Any], params: Mapping[str, Any] | None, config: object
    ) -> None:
        if not callable(function):
            raise ValueError(
                explain(
                    f"model_fn={function!r} is not callable.",
                    expected="a function of features, labels, mode, params and config.",
                    fix="pass the function itself, not its result.",
                )
            )
        self.function = function
        self._takes = arguments_of(function)
        self._check(params)
        self._params = params
        self._config = config

    def _check(self, params: object) -> None:
        if "features" not in self._takes:
            raise ValueError(
                explain(
                    f"model_fn takes {list(self._takes)} but not `features`.",
                    expected="an argument named `features`.",
                    fix="write def model_fn(features, labels, mode, params).",
                )
            )
        if params is not None and "params" not in self._takes:
            raise ValueError(
                explain(
                    f"model_fn does not take params={params!r}.",
                    expected="an argument named `params`.",
                    fix="write def model_fn(features, labels, mode, params), or omit params.",
                )
            )
        unknown = [name for name in self._takes if name not in _KNOWN]
        if unknown:
            raise ValueError(
                explain(
                    f"model_fn takes the unsupported arguments {unknown}.",
                    expected=f"a subset of {list(_KNOWN)}.",
                    fix="bind other arguments with functools.partial, or put them into params.",
                )
            )

    @property
    def gives_values(self) -> bool:
        """True if the function's scaffolds initialize all variables, so it runs untrained."""
        return bool(getattr(self.function, "gives_values", False))

    @property
    def takes_labels(self) -> bool:
        """True if the function has a `labels` argument."""
        return "labels" in self._takes

    def __call__(self, features: object, labels: object, mode: str) -> EstimatorSpec:
        """Calls the function and checks its result; `labels` is None if there are none."""
        if labels is not None and not self.takes_labels:
            raise ValueError(
                explain(
                    "input_fn returns labels, but model_fn does not take them.",
                    expected="a `labels` argument, or an input_fn that returns only features.",
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
    """Returns the names of a function's arguments that `functools.partial` has not bound."""
    bound = getattr(function, "keywords", {})
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(one.name for one in parameters if one.kind in kinds and one.name not in bound)
