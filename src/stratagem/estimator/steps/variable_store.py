"""The variables of a model function: the nth of a call is the nth of every call in that mode."""

from __future__ import annotations

import contextlib
import contextvars
from collections import Counter
from collections.abc import Generator
from typing import Any

import keras

from stratagem.keras.private import fresh_names
from stratagem.keras.variable_creation import Variable
from stratagem.keras.variable_source import VariableRequest, variables_from
from stratagem.messages import explain

__all__ = ["GLOBAL_STEP", "VariableStore", "current_store"]

GLOBAL_STEP = "global_step"

# Replicas that run op by op have a thread each, which begins with a copy of this.
_current: contextvars.ContextVar[VariableStore | None] = contextvars.ContextVar(
    "variable_store", default=None
)


def current_store() -> VariableStore | None:
    """Returns the store of the model function that is being called; None outside of one."""
    return _current.get()


class VariableStore:
    """The variables that the calls of one model function make under one strategy.

    Within a mode variables are told apart by the order in which a call makes them. What another
    mode has made under the same path is the same variable, except for those of metrics.

    Args:
        strategy: in whose scope they are made.
    """

    def __init__(self, strategy: Any) -> None:
        self._modes: dict[str, _Mode] = {}
        self._named: dict[str, Any] = {}
        self._counts: Counter[str] = Counter()
        self._strategy = strategy
        with strategy.scope(), variables_from(None):
            self.global_step = Variable(0, trainable=False, name=GLOBAL_STEP, dtype="int32")
        self._named[GLOBAL_STEP] = self.global_step

    @contextlib.contextmanager
    def call(self, mode: str) -> Generator[None]:
        """What is made in a `with` block is what this mode makes in each call.

        Automatic names of layers begin anew in it, so that paths are the same in every call.

        Args:
            mode: of the model function.

        Raises:
            ValueError: the block makes other variables than the mode's first call, or fewer.
        """
        made = self._modes.setdefault(mode, _Mode(mode))
        source = _Call(self, made)
        token = _current.set(self)
        try:
            with fresh_names(), variables_from(source):
                yield
        finally:
            _current.reset(token)
        source.end()

    def at_one_moment(self) -> contextlib.AbstractContextManager[None]:
        """Lets reads of variables in a `with` block agree, while others train on their servers."""
        if not self._strategy.placement.is_remote:
            return contextlib.nullcontext()
        return self._strategy.placement.remote.variables.caching_reads()

    def is_complete(self, mode: str) -> bool:
        """Tells whether the variables of a mode are known.

        Args:
            mode: of the model function.
        """
        return mode in self._modes and self._modes[mode].is_complete

    def made_in(self, mode: str) -> list[Any]:
        """Returns the variables of a mode in the order in which a call makes them.

        Args:
            mode: of the model function.
        """
        return list(self._modes[mode].variables) if mode in self._modes else []

    def register(self, variable: Any) -> None:
        """Takes a variable that existed before the model function, which uses it.

        Args:
            variable: of the strategy.
        """
        if not any(variable is known for known in self._named.values()):
            self._named[self._new_name(variable.path)] = variable

    @property
    def named(self) -> dict[str, Any]:
        """All variables but those of metrics, by name: the path, and a number where two have it."""
        return dict(self._named)

    def find(self, name: str) -> Any:
        """Returns the variable of a name; None if there is none.

        Args:
            name: as in `named`.
        """
        return self._named.get(name)

    def add(self, name: str, variable: Any) -> None:
        """Takes a new variable.

        Args:
            name: free until now.
            variable: the variable.
        """
        self._named[name] = variable

    def _new_name(self, path: str) -> str:
        number = 1
        while _name(path, number) in self._named:
            number += 1
        return _name(path, number)


class _Mode:
    """The variables of one mode, with what was asked for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.requests: list[VariableRequest] = []
        self.variables: list[Any] = []
        self.is_complete = False


class _Call:
    """One call of the model function, as the source of its variables."""

    def __init__(self, store: VariableStore, mode: _Mode) -> None:
        self._store = store
        self._mode = mode
        self._count = 0
        self._paths: Counter[str] = Counter()

    def existing(self, request: VariableRequest) -> keras.Variable | None:
        mode = self._mode
        if self._count < len(mode.variables):
            known = mode.requests[self._count]
            if (known.shape, known.dtype) != (request.shape, request.dtype):
                raise _another_variable(mode.name, self._count, known, request)
            self._count += 1
            return mode.variables[self._count - 1]
        if mode.is_complete:
            raise _one_more(mode.name, request, len(mode.variables))
        if request.is_collected:
            return None
        self._paths[request.path] += 1
        name = _name(request.path, self._paths[request.path])
        found = self._store.find(name)
        if found is None:
            return None
        if (tuple(found.shape), found.dtype) != (request.shape, request.dtype):
            raise _another_shape(mode.name, name, found, request)
        self._take(request, found)
        return found

    def add(self, request: VariableRequest, variable: keras.Variable) -> None:
        self._take(request, variable)
        if not request.is_collected:
            self._store.add(_name(request.path, self._paths[request.path]), variable)

    def _take(self, request: VariableRequest, variable: Any) -> None:
        self._mode.requests.append(request)
        self._mode.variables.append(variable)
        self._count += 1

    def end(self) -> None:
        mode = self._mode
        if self._count < len(mode.variables):
            raise _fewer(mode.name, self._count, mode.requests)
        mode.is_complete = True


def _name(path: str, number: int) -> str:
    """The same that a checkpoint gives to the later ones of several with one path."""
    return path if number == 1 else f"{path}#{number}"


_EVERY_CALL = "the same variables in the same order in every call of a mode."
_IN_THE_FUNCTION = (
    "make layers, optimizers and metrics in each call of the model function, and none of them "
    "under a condition that changes; or keep them outside and build them there, in the scope of "
    "the strategy."
)


def _another_variable(
    mode: str, place: int, known: VariableRequest, request: VariableRequest
) -> ValueError:
    return ValueError(
        explain(
            f"Variable {place + 1} that the model function made for mode {mode!r} is "
            f"{request.path!r} of shape {request.shape} and dtype {request.dtype}; in an earlier "
            f"call it was {known.path!r} of shape {known.shape} and dtype {known.dtype}.",
            expected=_EVERY_CALL,
            fix=_IN_THE_FUNCTION,
        )
    )


def _one_more(mode: str, request: VariableRequest, count: int) -> ValueError:
    return ValueError(
        explain(
            f"The model function made one more variable for mode {mode!r} than the {count} of an "
            f"earlier call: {request.path!r} of shape {request.shape}.",
            expected=_EVERY_CALL,
            fix=_IN_THE_FUNCTION,
        )
    )


def _fewer(mode: str, count: int, requests: list[VariableRequest]) -> ValueError:
    return ValueError(
        explain(
            f"The model function made {count} variables for mode {mode!r}, and {len(requests)} in "
            f"an earlier call: {requests[count].path!r} of shape {requests[count].shape} is "
            "missing.",
            expected=_EVERY_CALL,
            fix=_IN_THE_FUNCTION,
        )
    )


def _another_shape(mode: str, name: str, found: Any, request: VariableRequest) -> ValueError:
    return ValueError(
        explain(
            f"Variable {name!r} has shape {request.shape} and dtype {request.dtype} in mode "
            f"{mode!r}, and {tuple(found.shape)} and {found.dtype} in another mode.",
            expected="one shape and dtype for what has one path in several modes.",
            fix="give the layer that is another one a name of its own.",
        )
    )
