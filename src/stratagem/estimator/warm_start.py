"""Warm start: initial values of variables from an earlier training run."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from stratagem.checkpoint.checkpoint import Checkpoint
from stratagem.checkpoint.storage.files import is_whole
from stratagem.estimator.steps.checkpoints import VARIABLES, latest_checkpoint
from stratagem.estimator.steps.variable_store import VariableStore
from stratagem.messages import explain


@dataclasses.dataclass(frozen=True)
class WarmStartSettings:
    """Selects the variables to initialize from an earlier training run.

    Args:
        ckpt_to_initialize_from: an Estimator's checkpoint, or its `model_dir` for the latest one.
        vars_to_warm_start: a regular expression, searched for in the names of trainable variables;
            a list of expressions, searched for in the names of all variables, including
            optimizers'; or a list of variables.
        var_name_to_vocab_info: must be None.
        var_name_to_prev_var_name: a dict from names here to names in the checkpoint, where they
            differ.

    Raises:
        NotImplementedError: if `var_name_to_vocab_info` is set.

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
                    f"var_name_to_vocab_info is set for {sorted(self.var_name_to_vocab_info)}.",
                    expected="None: embedding rows are not remapped to a new vocabulary.",
                    fix="keep the vocabulary, or exclude these tables from vars_to_warm_start.",
                )
            )


def as_warm_start(source: object) -> WarmStartSettings | None:
    """Returns the settings for an Estimator's `warm_start_from` argument."""
    if source is None or isinstance(source, WarmStartSettings):
        return source
    if not isinstance(source, str | os.PathLike):
        raise TypeError(
            explain(
                f"warm_start_from={source!r} is of type {type(source).__name__}.",
                expected="a path or an sg.estimator.WarmStartSettings.",
                fix="pass the model_dir of the Estimator to start from.",
            )
        )
    return WarmStartSettings(os.fspath(source))


def warm_start(store: VariableStore, settings: WarmStartSettings) -> None:
    """Initializes the selected variables from the checkpoint. Call on every process."""
    path = _checkpoint_path(settings.ckpt_to_initialize_from)
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
    while left:  # several variables may read the same entry of the checkpoint
        round_ = dict(reversed(left))
        Checkpoint(**{VARIABLES: round_}).read(path).expect_partial()
        left = [pair for pair in left if round_[pair[0]] is not pair[1]]


def _checkpoint_path(path: str) -> str:
    found = path if is_whole(Path(path)) else latest_checkpoint(path)
    if found is None:
        raise ValueError(
            explain(
                f"{path} is neither an Estimator checkpoint nor a folder of checkpoints.",
                expected="the model_dir of a trained Estimator, or a checkpoint in it.",
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
                    f"vars_to_warm_start={one!r} matches no variable.",
                    expected=f"a regular expression that matches some of {sorted(named)}.",
                    fix="correct it, or pass a list to include variables that are not trainable.",
                )
            )
        chosen |= found
    return chosen
