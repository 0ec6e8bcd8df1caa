"""Variable store of a model function: reuses variables by creation order across calls."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras

from stratagem.checkpoint.checkpoint import Checkpoint
from stratagem.checkpoint.latest import run_on_first
from stratagem.checkpoint.manager import CheckpointManager
from stratagem.checkpoint.saving import CheckpointOptions, load_arrays, load_manifest
from stratagem.errors import explain
from stratagem.keras.private import fresh_names
from stratagem.keras.variables.creation import Variable
from stratagem.keras.variables.requests import VariableRequest, variables_from

if TYPE_CHECKING:
    from stratagem.estimator.run_config import RunConfig
    from stratagem.strategies.strategy import Strategy


GLOBAL_STEP = "global_step"

# Eager replicas run in threads, each with a copy of this context.
_current: contextvars.ContextVar[VariableStore | None] = contextvars.ContextVar(
    "variable_store", default=None
)


def current_store() -> VariableStore | None:
    """Returns the store of the model function being called, or None outside one."""
    return _current.get()


class VariableStore:
    """Variables that one model function creates under one strategy.

    Within a mode, variables are identified by creation order. Modes share variables of the same
    path, except those of metrics.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._modes: dict[str, _ModeVariables] = {}
        self._named: dict[str, Any] = {}
        self._strategy = strategy
        with strategy.scope(), variables_from(None):
            self.global_step = Variable(0, trainable=False, name=GLOBAL_STEP, dtype="int32")
        self._named[GLOBAL_STEP] = self.global_step

    @contextlib.contextmanager
    def call(self, mode: str) -> Generator[None]:
        """Reuses or creates the mode's variables inside the `with` block.

        Automatic layer names restart, so paths are the same in every call.
        """
        variables = self._modes.setdefault(mode, _ModeVariables(mode))
        source = _CallVariables(self, variables)
        token = _current.set(self)
        try:
            with fresh_names(), variables_from(source):
                yield
        finally:
            _current.reset(token)
        source.end()

    def consistent_reads(self) -> contextlib.AbstractContextManager[None]:
        """Makes reads in the `with` block consistent while other workers train on the servers."""
        if not self._strategy.placement.is_remote:
            return contextlib.nullcontext()
        return self._strategy.placement.remote.variables.caching_reads()

    def is_complete(self, mode: str) -> bool:
        """Returns True once a call of this mode has finished."""
        return mode in self._modes and self._modes[mode].is_complete

    def variables_of(self, mode: str) -> list[Any]:
        """Returns the variables of a mode in creation order."""
        return list(self._modes[mode].variables) if mode in self._modes else []

    def register(self, variable: keras.Variable) -> None:
        """Adds a variable that the model function uses but did not create."""
        if not any(variable is known for known in self._named.values()):
            self._named[self._new_name(variable.path)] = variable

    @property
    def named(self) -> dict[str, Any]:
        """All variables except those of metrics, by path; duplicate paths are numbered."""
        return dict(self._named)

    def find(self, name: str) -> Any:
        """Returns the variable of that name, or None."""
        return self._named.get(name)

    def add(self, name: str, variable: keras.Variable) -> None:
        """Adds a new variable."""
        self._named[name] = variable

    def _new_name(self, path: str) -> str:
        number = 1
        while _name(path, number) in self._named:
            number += 1
        return _name(path, number)


class _ModeVariables:
    """Variables of one mode and the requests that created them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.requests: list[VariableRequest] = []
        self.variables: list[Any] = []
        self.is_complete = False


class _CallVariables:
    """Variable source for one call of the model function."""

    def __init__(self, store: VariableStore, mode: _ModeVariables) -> None:
        self._store = store
        self._mode = mode
        self._count = 0
        self._paths: Counter[str] = Counter()

    def existing(self, request: VariableRequest) -> keras.Variable | None:
        mode = self._mode
        if self._count < len(mode.variables):
            known = mode.requests[self._count]
            if (known.shape, known.dtype) != (request.shape, request.dtype):
                raise _different(
                    f"Variable {self._count + 1} of the model function in mode {mode.name!r} is "
                    f"{request.path!r} with shape {request.shape} and dtype {request.dtype}; in an "
                    f"earlier call it was {known.path!r} with shape {known.shape} and dtype "
                    f"{known.dtype}."
                )
            self._count += 1
            return mode.variables[self._count - 1]
        if mode.is_complete:
            raise _different(
                f"The model function created more than the {len(mode.variables)} variables of an "
                f"earlier call in mode {mode.name!r}: {request.path!r} with shape {request.shape}."
            )
        if request.is_summed:
            return None
        self._paths[request.path] += 1
        name = _name(request.path, self._paths[request.path])
        found = self._store.find(name)
        if found is None:
            return None
        if (tuple(found.shape), found.dtype) != (request.shape, request.dtype):
            raise _different(
                f"Variable {name!r} has shape {request.shape} and dtype {request.dtype} in mode "
                f"{mode.name!r}, but shape {tuple(found.shape)} and dtype {found.dtype} in another "
                "mode.",
                expected="the same shape and dtype for a path in all modes.",
                fix="give the different layers different names.",
            )
        self._take(request, found)
        return found

    def add(self, request: VariableRequest, variable: keras.Variable) -> None:
        self._take(request, variable)
        if not request.is_summed:
            self._store.add(_name(request.path, self._paths[request.path]), variable)

    def _take(self, request: VariableRequest, variable: keras.Variable) -> None:
        self._mode.requests.append(request)
        self._mode.variables.append(variable)
        self._count += 1

    def end(self) -> None:
        mode = self._mode
        if self._count < len(mode.variables):
            missing = mode.requests[self._count]
            raise _different(
                f"The model function created {self._count} variables in mode {mode.name!r}, but "
                f"{len(mode.requests)} in an earlier call: {missing.path!r} with shape "
                f"{missing.shape} is missing."
            )
        mode.is_complete = True


def _name(path: str, number: int) -> str:
    """Numbers repeated paths the way checkpoints do."""
    return path if number == 1 else f"{path}#{number}"


def _different(
    received: str,
    expected: str = "the same variables in the same order in every call of a mode.",
    fix: str = "create layers, optimizers and metrics unconditionally in each call of the model "
    "function; or build them outside it, in the strategy's scope.",
) -> ValueError:
    return ValueError(explain(received, expected=expected, fix=fix, code="SG901"))


# Checkpoints of an Estimator: saving, restoring and reading of variables.

CHECKPOINT_NAME = "model.ckpt"
# TensorFlow's default, more than a year. It disables keeping checkpoints by age.
_NEVER_HOURS = 10_000
# Name of the model function's variables in a checkpoint.
VARIABLES = "variables"


def latest_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Returns the newest checkpoint in an Estimator's folder, or None. Call on every process."""
    manager = CheckpointManager(Checkpoint(), folder, None, checkpoint_name=CHECKPOINT_NAME)
    return manager.latest_checkpoint


class ModelCheckpoints:
    """Saves and restores a store's variables; `is_initial` until they are restored or trained."""

    def __init__(self, store: VariableStore, folder: str, config: RunConfig) -> None:
        self._store = store
        self._folder = folder
        self._config = config
        self._values: tuple[str | None, int] = (None, 0)
        self.is_initial = True

    def save(self) -> str:
        """Saves all variables unless a checkpoint has these values. Call on every process."""
        path, count = self._values
        if path is not None and count == len(self._store.named) and self._is_of_series(path):
            return path
        hours = self._config.keep_checkpoint_every_n_hours
        manager = CheckpointManager(
            self._checkpoint(),
            self._folder,
            self._config.keep_checkpoint_max or None,
            keep_checkpoint_every_n_hours=hours if hours < _NEVER_HOURS else None,
            checkpoint_name=CHECKPOINT_NAME,
            step_counter=self._store.global_step,
        )
        with self._store.consistent_reads():
            path = manager.save(check_interval=False)
        assert path is not None
        self._values = (path, len(self._store.named))
        return path

    @property
    def latest(self) -> str | None:
        """Path of the newest checkpoint in the folder, or None."""
        return latest_checkpoint(self._folder)

    def restore(self, path: str) -> None:
        """Restores all variables unless they already have these values. Call on every process."""
        count = len(self._store.named)
        if self._values == (path, count):
            return
        # Each replica gets its own component of an on-read variable back.
        status = self._checkpoint().read(path, CheckpointOptions(restore_components=True))
        status.expect_partial()  # evaluation has no optimizer
        self._values = (path, count)
        self.is_initial = False

    def forget(self) -> None:
        """Marks the variables as changed since the last checkpoint."""
        self._values = (None, 0)
        self.is_initial = False

    def _is_of_series(self, path: str) -> bool:
        """Returns True if the next save would write this path."""
        name = f"{CHECKPOINT_NAME}-{int(self._store.global_step)}"
        return Path(path).absolute() == (Path(self._folder) / name).absolute()

    def _checkpoint(self) -> Checkpoint:
        return Checkpoint(**{VARIABLES: self._store.named})


def read_names(path: str) -> list[str]:
    """Returns the sorted names of a checkpoint's variables. Call on every process."""
    return sorted(run_on_first("Estimator.get_variable_names", lambda: _entries(path)[2]))


def _entries(path: str) -> tuple[dict[str, Any], str, list[str]]:
    """Returns a checkpoint's manifest, the item that holds the variables, and their names."""
    manifest = load_manifest(Path(path))
    item = manifest["objects"][VARIABLES]["item"]
    return manifest, item, [entry["path"] for entry in manifest["items"][item]]


def read_values(path: str) -> dict[str, Any]:
    """Returns the values of a checkpoint's variables by name."""
    manifest, item, _ = _entries(path)
    return dict(load_arrays(Path(path), manifest, [item])[item])


def read_variable(path: str, name: str) -> Any:
    """Returns the value of one variable in a checkpoint."""
    manifest, item, names = _entries(path)
    wanted = name.removesuffix(":0")
    if wanted not in names:
        raise ValueError(
            explain(
                f"{path} contains no variable named {name!r}.",
                expected=f"one of {sorted(names)}.",
                fix="correct the name; get_variable_names() lists all names.",
            )
        )
    return load_arrays(Path(path), manifest, [item])[item][wanted]
