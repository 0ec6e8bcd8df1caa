"""Estimator: a model function that is trained, evaluated and served under any strategy."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from stratagem.checkpoint.group_calls import is_first, run_on_first
from stratagem.estimator.estimator_arguments import (
    as_hooks,
    check_members,
    check_steps,
    folder_of,
    last_step_of,
    require_config,
)
from stratagem.estimator.exporting.export_programs import (
    check_receiver,
    make_variables,
    signatures_of,
    write_export,
)
from stratagem.estimator.hooks import SessionRunHook
from stratagem.estimator.loops import training
from stratagem.estimator.loops.batches import InputFunction, ModelBatches
from stratagem.estimator.loops.evaluation_record import write_eval_metrics
from stratagem.estimator.loops.host_parts import HostParts
from stratagem.estimator.loops.placed_model import PlacedModel, PlacedModels
from stratagem.estimator.loops.session import HookedLoop, ModelSession
from stratagem.estimator.loops.training_hooks import training_hooks
from stratagem.estimator.loops.training_summaries import TrainingSummaries, write_results
from stratagem.estimator.mode_keys import ModeKeys
from stratagem.estimator.settings.run_config import RunConfig
from stratagem.estimator.settings.strategy_choice import (
    close_made,
    made_strategy,
    strategy_of_training,
)
from stratagem.estimator.spec import EstimatorSpec
from stratagem.estimator.steps.checkpoints import latest_checkpoint, read_names, read_variable
from stratagem.estimator.steps.model_function import ModelFunction
from stratagem.estimator.steps.model_step import hooks_of
from stratagem.estimator.steps.prediction import batches_of, check_keys, examples_of
from stratagem.estimator.tasks.standalone_client import remote_cluster_of, run_remotely
from stratagem.estimator.warm_start import as_warm_start, warm_start
from stratagem.messages import explain

__all__ = ["Estimator"]


class Estimator:
    """Trains, evaluates and predicts with a model function, under any strategy.

    `model_fn(features, labels, mode, params, config)`, of which it takes what it needs by name, is
    called in replica context when a step is traced. It makes Keras layers, an optimizer and metrics
    in each call; the nth variable of a call is the same one in every call. It returns an
    `EstimatorSpec`.

    An `input_fn` returns a dataset of `(features, labels)`, or of features, in batches of one
    replica; or one such batch, which is the same in every step. It is called once on each worker,
    and may take `input_context`, `mode`, `params` and `config`.

    Args:
        model_fn: the model function.
        model_dir: the folder of checkpoints and summaries; None for that of the config, or a new
            temporary one.
        config: a `RunConfig`, which also names the strategies; None for one device.
        params: passed to the model function; a dict, for example of sizes.
        warm_start_from: a checkpoint, the folder of another Estimator, or a `WarmStartSettings`,
            whose values training begins with where `model_dir` has no checkpoint.

    Raises:
        TypeError: a config of another type.
        ValueError: a model function that cannot be called so, two different folders, or a subclass
            that overrides a member.

    Example:
        >>> def model_fn(features, labels, mode):
        ...     outputs = keras.layers.Dense(1)(features)[:, 0]
        ...     if mode == sg.estimator.ModeKeys.PREDICT:
        ...         return sg.estimator.EstimatorSpec(mode, predictions=outputs)
        ...     loss = keras.ops.mean((outputs - labels) ** 2)
        ...     train_op = sg.estimator.minimize(keras.optimizers.SGD(0.1), loss)
        ...     return sg.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)
        >>> x = np.array([[0.0], [1.0], [2.0], [3.0]], "float32")
        >>> data = lambda: sg.input.Dataset((x, 2 * x[:, 0]), batch_size=2)
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> config = sg.estimator.RunConfig(train_distribute=strategy)
        >>> estimator = sg.estimator.Estimator(model_fn, config=config)
        >>> for _ in range(50):
        ...     _ = estimator.train(data)
        >>> estimator.evaluate(data)["loss"] < 0.1
        np.True_

    Source: tensorflow/estimator estimator.py, EstimatorV2.
    """

    def __init__(
        self,
        model_fn: Callable[..., EstimatorSpec],
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
        warm_start_from: Any = None,
    ) -> None:
        check_members(type(self), Estimator)
        config = require_config(config)
        folder = folder_of(model_dir, config)
        if folder is None:
            folder = run_on_first("Estimator", tempfile.mkdtemp)
        self._config = config.replace(model_dir=folder)
        self._model_dir = folder
        self._params = copy.deepcopy(params)
        self._function = ModelFunction(model_fn, self._params, self._config)
        self._models = PlacedModels(self._function, folder, self._config)
        self._warm_start = as_warm_start(warm_start_from)
        self._host_parts = HostParts()

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs of it: it has variables of its own."""
        return {name: value for name, value in vars(self).items() if name != "_models"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._models = PlacedModels(self._function, self._model_dir, self._config)

    @property
    def model_dir(self) -> str:
        """The folder of checkpoints and summaries."""
        return self._model_dir

    @property
    def config(self) -> RunConfig:
        """The settings, with `model_dir`."""
        return self._config

    @property
    def params(self) -> Any:
        """A copy of the parameters of the model function."""
        return copy.deepcopy(self._params)

    @property
    def model_fn(self) -> Callable[..., EstimatorSpec]:
        """The model function, as a function of features, labels, mode and config."""

        def call(features: Any, labels: Any, mode: str, config: Any) -> EstimatorSpec:
            return ModelFunction(self._function.function, self._params, config)(
                features, labels, mode
            )

        return call

    @property
    def gives_values(self) -> bool:
        """Whether the model function has values to begin with, as that of a Keras model does."""
        return self._function.gives_values

    def train(
        self,
        input_fn: Callable[..., Any],
        hooks: Sequence[SessionRunHook] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[Any] | None = None,
    ) -> Estimator:
        """Trains from the latest checkpoint on, until the data or the steps end.

        Call on every worker.

        Args:
            input_fn: gives the data.
            hooks: called around each step, on every worker.
            steps: how many steps to train; not together with `max_steps`.
            max_steps: the global step to end at; where it is reached already nothing is done.
            saving_listeners: told before and after each checkpoint.

        Returns:
            This Estimator.

        Raises:
            TypeError: hooks or listeners of another type, or an `input_fn` that cannot be called.
            ValueError: both numbers of steps, or not positive ones; no data; or labels that the
                model function does not take.

        Source: tensorflow/estimator estimator.py, Estimator.train.
        """
        check_steps("steps", steps)
        check_steps("max_steps", max_steps)
        last_step = last_step_of(steps, max_steps)
        hooks = as_hooks(hooks)
        if remote_cluster_of(self._config) is not None:
            run_remotely(self, _train_there, (input_fn, hooks, steps, max_steps, saving_listeners))
            return self
        strategy = strategy_of_training(self._config)  # joins a cluster before JAX is used
        latest = self.latest_checkpoint()
        if latest is not None and max_steps is not None and self._step_of(latest) >= max_steps:
            self._models.skip_training(strategy)
            return self
        self._set_seed()
        model = self._models.under(strategy)
        batches = model.part.batches(self._input(input_fn, ModeKeys.TRAIN, repeats=True))
        training.train(
            model,
            batches,
            model_dir=self._model_dir,
            initialize=lambda: self._initialize(model, self.latest_checkpoint()),
            make_hooks=lambda spec: training_hooks(
                spec, hooks, self._config, saving_listeners, self._model_dir, model.part
            ),
            last_step=last_step,
            wait_limit_s=self._config.session_creation_timeout_secs,
            summaries=TrainingSummaries(
                self._model_dir, self._config.save_summary_steps if model.part.saves else None
            ),
        )
        return self

    def evaluate(
        self,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        hooks: Sequence[SessionRunHook] | None = None,
        checkpoint_path: str | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """Evaluates a checkpoint. Call on every worker of `eval_distribute`.

        Args:
            input_fn: gives the data.
            steps: how many batches of all replicas; None for all.
            hooks: called around each step.
            checkpoint_path: the checkpoint; None for the latest.
            name: of the evaluation, where there are several: a part of the name of its folder.

        Returns:
            The metrics of the model function, the average `loss` over the examples, and
            `global_step`.

        Raises:
            ValueError: nothing was trained yet; steps that are not positive; or no data.

        Source: tensorflow/estimator estimator.py, Estimator.evaluate.
        """
        check_steps("steps", steps)
        loop_hooks = as_hooks(hooks)
        path = self._checkpoint_to_use(checkpoint_path)
        self._set_seed()
        model = self._models.under(made_strategy(self._config.eval_distribute))
        source = self._input(input_fn, ModeKeys.EVAL, repeats=steps is not None)
        batches = ModelBatches(source, model.strategy)
        step = model.evaluation
        with contextlib.closing(batches):
            first = batches.first()
            spec = step.prepare(first)
            session = ModelSession(step, spec, model.checkpoints, self._model_dir)
            loop = HookedLoop(session, [*loop_hooks, *hooks_of(spec, ModeKeys.EVAL)])
            loop.begin()
            self._start(model, path, session, spec)
            session.read_global_step()
            step.reset()
            loop.create_session()
            for batch in itertools.islice(itertools.chain([first], batches), steps):
                with loop.step() as run:
                    run.finish(step.run(batch))
                if run.stop_requested:
                    break
            loop.end()
        results: dict[str, Any] = {
            key: np.asarray(value)[()] for key, value in step.results().items()
        }
        write_results(self.eval_dir(name), results, session.global_step)
        results["global_step"] = session.global_step
        if is_first():
            write_eval_metrics(self.eval_dir(name), results)
        return results

    def predict(
        self,
        input_fn: Callable[..., Any],
        predict_keys: str | Sequence[str] | None = None,
        hooks: Sequence[SessionRunHook] | None = None,
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """Yields predictions in the order of the input.

        It runs on one device of this process, whatever the strategies are. With several workers
        each predicts what its own `input_fn` gives, and all have to call it: they read the
        checkpoint together.

        Args:
            input_fn: gives features; labels are left out.
            predict_keys: which predictions, where the model function gives a dict; None for all.
            hooks: called around each step.
            checkpoint_path: the checkpoint; None for the latest.
            yield_single_examples: whether to yield rows, or else whole batches.

        Yields:
            The predictions of an example: an array, or a dict of arrays.

        Raises:
            ValueError: nothing was trained yet; unknown keys; or predictions without a row for each
                example.

        Source: tensorflow/estimator estimator.py, Estimator.predict.
        """
        loop_hooks = as_hooks(hooks)
        path = self._checkpoint_to_use(checkpoint_path)
        self._set_seed()
        model = self._models.under(None)
        source = self._input(input_fn, ModeKeys.PREDICT, repeats=False)
        batches = ModelBatches(source, model.strategy)
        step = model.prediction
        with contextlib.closing(batches):
            first = batches.first()
            spec = step.prepare((first[0], None))
            keys = check_keys(spec.predictions, predict_keys)
            session = ModelSession(step, spec, model.checkpoints, self._model_dir)
            loop = HookedLoop(session, [*loop_hooks, *hooks_of(spec, ModeKeys.PREDICT)])
            loop.begin()
            self._start(model, path, session, spec)
            session.read_global_step()
            loop.create_session()
            for features, _ in itertools.chain([first], batches):
                with loop.step() as run:
                    values = step.run((features, None))
                    run.finish(values)
                made = batches_of(model.strategy, values["predictions"], keys)
                for batch in map(self._host_parts.decoded, made):
                    yield from examples_of(batch) if yield_single_examples else (batch,)
                if run.stop_requested:
                    break
            loop.end()

    def export_saved_model(
        self,
        export_dir_base: str | os.PathLike[str],
        serving_input_receiver_fn: Callable[[], Any],
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
        checkpoint_path: str | None = None,
        experimental_mode: str = ModeKeys.PREDICT,
    ) -> str:
        """Exports prediction as compiled programs that `load_exported` runs without the model.

        The programs are StableHLO for CPUs, CUDA GPUs and TPUs, for batches of any size. Each of
        the spec's `export_outputs` is a signature; where there are none, the predictions are the
        signature "serving_default". Call on every worker.

        Args:
            export_dir_base: the folder of exports.
            serving_input_receiver_fn: returns the inputs, a `ServingInputReceiver`.
            assets_extra: files to copy: sources by their paths in the folder "assets.extra".
            as_text: whether to write the programs for people, too.
            checkpoint_path: the checkpoint; None for the latest.
            experimental_mode: "infer".

        Returns:
            The new folder in the folder of exports; its name is the time in seconds.

        Raises:
            NotImplementedError: another mode.
            TypeError: no receiver, or export outputs of another type.
            ValueError: nothing was trained yet, or the model function cannot be traced for any size
                of a batch.

        Source: tensorflow/estimator estimator.py, Estimator.export_saved_model.
        """
        if experimental_mode != ModeKeys.PREDICT:
            raise NotImplementedError(
                explain(
                    f"experimental_mode={experimental_mode!r}.",
                    expected="'infer': an export predicts, and its variables do not change.",
                    fix="train and evaluate with the Estimator itself.",
                )
            )
        path = self._checkpoint_to_use(checkpoint_path)
        receiver = check_receiver(serving_input_receiver_fn)
        model = self._models.under(None)
        spec = make_variables(model.prediction, receiver)
        session = ModelSession(model.prediction, spec, model.checkpoints, self._model_dir)
        self._start(model, path, session, spec)
        return write_export(
            os.fspath(export_dir_base),
            model.prediction,
            signatures_of(model.prediction, receiver),
            assets_extra or {},
            as_text=as_text,
        )

    def latest_checkpoint(self) -> str | None:
        """Returns the path of the latest checkpoint in `model_dir`; None where there is none."""
        return latest_checkpoint(self._model_dir)

    def eval_dir(self, name: str | None = None) -> str:
        """Returns the folder of the summaries of an evaluation.

        Args:
            name: of the evaluation.
        """
        return os.path.join(self._model_dir, f"eval_{name}" if name else "eval")

    def get_variable_names(self) -> list[str]:
        """Returns the names of all variables in the latest checkpoint, sorted.

        Raises:
            ValueError: nothing was trained yet.
        """
        return read_names(self._trained(self.latest_checkpoint()))

    def get_variable_value(self, name: str) -> Any:
        """Returns the value of a variable in the latest checkpoint.

        Args:
            name: of the variable.

        Raises:
            ValueError: nothing was trained yet, or there is no variable of that name.
        """
        return read_variable(self._trained(self.latest_checkpoint()), name)

    def _input(self, input_fn: Callable[..., Any], mode: str, *, repeats: bool) -> InputFunction:
        return InputFunction(
            input_fn, mode, self.params, self._config, self._host_parts, repeats=repeats
        )

    def _initialize(self, model: PlacedModel, path: str | None) -> bool:
        """Gives the variables that exist their values; tells whether they are of a checkpoint."""
        if path is not None:
            model.checkpoints.restore(path)
        elif self._warm_start is not None and model.checkpoints.is_initial:
            warm_start(model.store, self._warm_start)
        return path is not None

    def _start(
        self, model: PlacedModel, path: str | None, session: ModelSession, spec: EstimatorSpec
    ) -> None:
        """Gives variables that are not trained here their values."""
        self._initialize(model, path)
        if path is None and spec.scaffold is not None:
            spec.scaffold.init_fn(session)

    def _checkpoint_to_use(self, path: str | None) -> str | None:
        """Returns the checkpoint to run with; None where the values are those of the start."""
        found = path or self.latest_checkpoint()
        has_start = self.gives_values or self._warm_start is not None
        return found if has_start else self._trained(found)

    def _trained(self, found: str | None) -> str:
        if found is None:
            raise ValueError(
                explain(
                    f"{self._model_dir} holds no checkpoint: nothing was trained yet.",
                    expected="an Estimator that was trained, or checkpoint_path.",
                    fix="call train first, or pass the model_dir of the training.",
                )
            )
        return found

    def _step_of(self, path: str) -> int:
        return int(read_variable(path, "global_step"))

    def _set_seed(self) -> None:
        if self._config.tf_random_seed is not None:
            keras.utils.set_random_seed(self._config.tf_random_seed)


def _train_there(
    estimator: Estimator,
    input_fn: Any,
    hooks: Any,
    steps: int | None,
    max_steps: int | None,
    saving_listeners: Any,
) -> None:
    """What a client has the tasks of its cluster do."""
    if estimator.config.task_type != "evaluator":
        estimator.train(input_fn, hooks, steps, max_steps, saving_listeners)
        close_made()
