"""Training that begins with the values of an earlier one."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from stratagem.checkpoint import Checkpoint
from stratagem.estimator.steps.checkpoints import VARIABLES, latest_checkpoint
from stratagem.estimator.steps.variable_store import VariableStore
from stratagem.messages import explain
from stratagem.storage import is_whole

__all__ = ["WarmStartSettings", "as_warm_start", "warm_start"]


@dataclasses.dataclass(frozen=True)
class WarmStartSettings:
    """Which variables begin with values of an earlier training.

    Args:
        ckpt_to_initialize_from: a checkpoint of an Estimator, or its `model_dir`, of which the
            latest is taken.
        vars_to_warm_start: a regular expression that the names of trainable variables are searched
            for; or a list of such, for all variables, also those of optimizers; or a list of
            variables.
        var_name_to_vocab_info: None.
        var_name_to_prev_var_name: names in the checkpoint, by the names here where they differ.

    Raises:
        NotImplementedError: vocabularies.

    Example:
        >>> settings = sg.estimator.WarmStartSettings("model", vars_to_warm_start="dense.*")

    Source: tensorflow/estimator estimator.py, WarmStartSettings.
    """

    ckpt_to_initialize_from: str
    vars_to_warm_start: str | Sequence[Any] = ".*"
    var_name_to_vocab_info: Mapping[str, Any] | None = None
    var_name_to_prev_var_name: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if self.var_name_to_vocab_info:
            raise NotImplementedError(
                explain(
                    "var_name_to_vocab_info names vocabularies of "
                    f"{sorted(self.var_name_to_vocab_info)}.",
                    expected="None: rows of tables are not sorted by another vocabulary.",
                    fix="keep the vocabulary, or leave these tables out of vars_to_warm_start.",
                )
            )


def as_warm_start(given: Any) -> WarmStartSettings | None:
    """Returns what an Estimator's `warm_start_from` stands for.

    Args:
        given: settings, the path of a checkpoint or a folder of some, or None.

    Raises:
        TypeError: of another type.
    """
    if given is None or isinstance(given, WarmStartSettings):
        return given
    if not isinstance(given, str | os.PathLike):
        raise TypeError(
            explain(
                f"warm_start_from={given!r} is of type {type(given).__name__}.",
                expected="a path, or an sg.estimator.WarmStartSettings.",
                fix="pass the model_dir of the Estimator to begin with.",
            )
        )
    return WarmStartSettings(os.fspath(given))


def warm_start(store: VariableStore, settings: WarmStartSettings) -> None:
    """Gives variables the values that they begin with. Call on every process.

    Args:
        store: the variables, which exist.
        settings: which, and from where.

    Raises:
        ValueError: there is no checkpoint, or it does not hold a variable, or with another shape.
    """
    path = _checkpoint(settings.ckpt_to_initialize_from)
    renamed = dict(settings.var_name_to_prev_var_name or {})
    chosen = _chosen(store, settings.vars_to_warm_start)
    unused = sorted(set(renamed) - set(chosen))
    if unused:
        raise ValueError(
            explain(
                f"var_name_to_prev_var_name renames {unused}, which are not warm-started.",
                expected=f"some of {sorted(chosen)}.",
                fix="correct the names, or vars_to_warm_start.",
            )
        )
    left = [(renamed.get(name, name), variable) for name, variable in chosen.items()]
    while left:  # several may begin with one of the checkpoint
        round_ = dict(reversed(left))
        Checkpoint(**{VARIABLES: round_}).read(path).expect_partial()
        left = [pair for pair in left if round_[pair[0]] is not pair[1]]


def _checkpoint(path: str) -> str:
    # Whether it is a checkpoint or a folder of some.
    found = path if is_whole(Path(path)) else latest_checkpoint(path)
    if found is None:
        raise ValueError(
            explain(
                f"{path} is no checkpoint of an Estimator, nor a folder of some.",
                expected="the model_dir of an Estimator that was trained, or a checkpoint in it.",
                fix="correct the path to warm-start from.",
            )
        )
    return found


def _chosen(store: VariableStore, wanted: str | Sequence[Any]) -> dict[str, Any]:
    named = store.named
    if isinstance(wanted, str):
        named = {name: variable for name, variable in named.items() if variable.trainable}
        wanted = [wanted]
    chosen: dict[str, Any] = {}
    for one in wanted:
        found = {
            name: variable
            for name, variable in named.items()
            if (variable is one if isinstance(one, keras.Variable) else re.search(one, name))
        }
        if not found:
            raise ValueError(
                explain(
                    f"vars_to_warm_start has {one!r}, which is in no name of a variable.",
                    expected=f"a regular expression for some of {sorted(named)}.",
                    fix="correct it; a list of expressions also finds what is not trained.",
                )
            )
        chosen |= found
    return chosen
