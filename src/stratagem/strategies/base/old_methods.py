"""TensorFlow's older names of strategy methods, from the table in `old_names`."""

from __future__ import annotations

from typing import Any

from stratagem.logs import warn_on_one_worker
from stratagem.messages import explain
from stratagem.old_names import OLD_METHODS, SAME_METHODS


class OldMethods:
    """Resolves older names of a strategy's methods, which `dir` does not list."""

    def __getattr__(self, name: str) -> Any:
        kind = type(self).__name__
        if name in SAME_METHODS:
            new = SAME_METHODS[name]
            warn_on_one_worker(
                f"{kind}.{name} is an older name of {kind}.{new}.", DeprecationWarning, stacklevel=2
            )
            return getattr(self, new)
        if name in OLD_METHODS:
            raise AttributeError(
                explain(
                    f"{kind} has no method {name!r}.",
                    expected="TensorFlow's newer names.",
                    fix=f"write {OLD_METHODS[name]}.",
                )
            )
        raise AttributeError(f"{kind!r} object has no attribute {name!r}")
