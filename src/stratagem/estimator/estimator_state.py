"""Settings, model function and checkpoints of an Estimator."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import keras

from stratagem.checkpoint.group_calls import run_on_first
from stratagem.estimator.argument_checks import require_config, resolve_model_dir
from stratagem.estimator.loops.distributed_model import DistributedModel, DistributedModels
from stratagem.estimator.loops.host_transforms import HostTransforms
from stratagem.estimator.settings.run_config import RunConfig
from stratagem.estimator.spec import EstimatorSpec
from stratagem.estimator.steps.checkpoints import latest_checkpoint, read_names, read_variable
from stratagem.estimator.steps.model_function import ModelFunction
from stratagem.estimator.warm_start import as_warm_start, warm_start
from stratagem.messages import explain


class EstimatorState:
    """Base class of `Estimator`: everything except its runs."""

    def __init__(
        self,
        model_fn: Callable[..., EstimatorSpec],
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
        warm_start_from: object = None,
    ) -> None:
        config = require_config(config)
        folder = resolve_model_dir(model_dir, config)
        if folder is None:
            folder = run_on_first("Estimator", tempfile.mkdtemp)
        self._config = config.replace(model_dir=folder)
        self._model_dir = folder
        self._params = copy.deepcopy(params)
        self._function = ModelFunction(model_fn, self._params, self._config)
        self._models = DistributedModels(self._function, folder, self._config)
        self._warm_start = as_warm_start(warm_start_from)
        self._host_transforms = HostTransforms()

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the variables: another process creates its own."""
        return {name: value for name, value in vars(self).items() if name != "_models"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._models = DistributedModels(self._function, self._model_dir, self._config)

    @property
    def model_dir(self) -> str:
        """Folder of checkpoints and summaries."""
        return self._model_dir

    @property
    def config(self) -> RunConfig:
        """Run configuration, including `model_dir`."""
        return self._config

    @property
    def params(self) -> Any:
        """Copy of the model function's parameters."""
        return copy.deepcopy(self._params)

    @property
    def model_fn(self) -> Callable[..., EstimatorSpec]:
        """Model function, as a function of features, labels, mode and config."""

        def call(features: object, labels: object, mode: str, config: object) -> EstimatorSpec:
            return ModelFunction(self._function.function, self._params, config)(
                features, labels, mode
            )

        return call

    @property
    def gives_values(self) -> bool:
        """True if the model function supplies initial values, as a converted Keras model does."""
        return self._function.gives_values

    def latest_checkpoint(self) -> str | None:
        """Returns the path of the latest checkpoint in `model_dir`, or None."""
        return latest_checkpoint(self._model_dir)

    def eval_dir(self, name: str | None = None) -> str:
        """Returns the folder of an evaluation's summaries.

        Args:
            name: the name passed to `evaluate`.
        """
        return os.path.join(self._model_dir, f"eval_{name}" if name else "eval")

    def get_variable_names(self) -> list[str]:
        """Returns the sorted names of all variables in the latest checkpoint.

        Raises:
            ValueError: if there is no checkpoint.
        """
        return read_names(self._trained(self.latest_checkpoint()))

    def get_variable_value(self, name: str) -> Any:
        """Returns the value of a variable in the latest checkpoint.

        Args:
            name: a name from `get_variable_names`.

        Returns:
            A NumPy array.

        Raises:
            ValueError: if there is no checkpoint, or no variable of that name.
        """
        return read_variable(self._trained(self.latest_checkpoint()), name)

    def _initialize(self, model: DistributedModel, path: str | None) -> bool:
        """Restores or warm-starts existing variables; True if they come from a checkpoint."""
        if path is not None:
            model.checkpoints.restore(path)
        elif self._warm_start is not None and model.checkpoints.is_initial:
            warm_start(model.store, self._warm_start)
        return path is not None

    def _checkpoint_to_use(self, path: str | None) -> str | None:
        """Returns the checkpoint to run with, or None to use initial values."""
        found = path or self.latest_checkpoint()
        has_start = self.gives_values or self._warm_start is not None
        return found if has_start else self._trained(found)

    def _trained(self, found: str | None) -> str:
        if found is None:
            raise ValueError(
                explain(
                    f"{self._model_dir} contains no checkpoint.",
                    expected="a trained Estimator, or checkpoint_path.",
                    fix="call train first, or pass the model_dir of a trained model.",
                )
            )
        return found

    def _step_of(self, path: str) -> int:
        return int(read_variable(path, "global_step"))

    def _set_seed(self) -> None:
        if self._config.tf_random_seed is not None:
            keras.utils.set_random_seed(self._config.tf_random_seed)
