"""Estimator: training, evaluation, prediction and export of a model function."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stratagem.checkpoint.group_calls import is_first
from stratagem.estimator.argument_checks import check_instances, check_members, last_step_function
from stratagem.estimator.estimator_state import EstimatorState
from stratagem.estimator.exporting.export_programs import (
    check_receiver,
    make_variables,
    signatures_of,
    write_export,
)
from stratagem.estimator.exporting.serving import ServingInputReceiver
from stratagem.estimator.hooks.session_run_hook import SessionRunHook
from stratagem.estimator.loops import training
from stratagem.estimator.loops.batches import InputFunction, ModelBatches
from stratagem.estimator.loops.distributed_model import DistributedModel
from stratagem.estimator.loops.evaluation_record import write_eval_metrics
from stratagem.estimator.loops.inference import InferenceLoop
from stratagem.estimator.loops.session import ModelSession
from stratagem.estimator.loops.training_hooks import training_hooks
from stratagem.estimator.loops.training_summaries import write_results
from stratagem.estimator.mode_keys import ModeKeys
from stratagem.estimator.number_checks import check_minimum
from stratagem.estimator.settings.run_config import RunConfig
from stratagem.estimator.settings.strategy_choice import (
    close_strategies,
    resolve_strategy,
    training_strategy,
)
from stratagem.estimator.spec import EstimatorSpec
from stratagem.estimator.steps.prediction import prediction_batches, select_keys, split_examples
from stratagem.estimator.tasks.standalone_client import remote_cluster_of, run_remotely
from stratagem.messages import explain

if TYPE_CHECKING:
    from stratagem.estimator.hooks.checkpoint_saver import CheckpointSaverListener


class Estimator(EstimatorState):
    """Trains, evaluates and predicts with a model function under any strategy.

    `model_fn` takes any of `features`, `labels`, `mode`, `params` and `config` by name. It runs in
    replica context while a step is traced. Each call creates its Keras layers, optimizer and
    metrics; the nth variable that a call creates is the same variable in every call. It returns an
    `EstimatorSpec`.

    `input_fn` returns a dataset of `(features, labels)` or of features alone, in per-replica
    batches; or a single such batch, which is reused in every step. It is called once on each
    worker and may take `input_context`, `mode`, `params` and `config`.

    Args:
        model_fn: the model function.
        model_dir: the folder of checkpoints and summaries. None uses the config's, or a new
            temporary folder.
        config: a `RunConfig`, which also holds the strategies; None for one device.
        params: a dict passed to the model function, for example of layer sizes.
        warm_start_from: a checkpoint, another Estimator's folder, or a `WarmStartSettings`: the
            initial values if `model_dir` has no checkpoint.

    Raises:
        TypeError: if `config` is not a `RunConfig`.
        ValueError: if `model_fn` takes unsupported arguments, the config names a different folder,
            or a subclass overrides a member.

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
        warm_start_from: object = None,
    ) -> None:
        check_members(type(self), Estimator)
        super().__init__(model_fn, model_dir, config, params, warm_start_from)

    def train(
        self,
        input_fn: Callable[..., Any],
        hooks: Sequence[SessionRunHook] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[Any] | None = None,
    ) -> Estimator:
        """Trains from the latest checkpoint until the data or the steps run out.

        Call on every worker.

        Args:
            input_fn: returns the training data.
            hooks: called around each step, on every worker.
            steps: the number of steps to train; excludes `max_steps`.
            max_steps: the global step to stop at. If it is already reached, nothing happens.
            saving_listeners: called before and after each checkpoint.

        Returns:
            This Estimator.

        Raises:
            TypeError: if hooks or listeners have the wrong type, or `input_fn` is not callable.
            ValueError: if both step counts are set or one is not positive, there is no data, or the
                data has labels that the model function does not take.

        Source: tensorflow/estimator estimator.py, Estimator.train.
        """
        check_minimum("steps", steps, 1)
        check_minimum("max_steps", max_steps, 1)
        last_step = last_step_function(steps, max_steps)
        hooks = check_instances("hooks", tuple(hooks or ()), SessionRunHook)
        if remote_cluster_of(self._config) is not None:
            run_remotely(self, _train_there, (input_fn, hooks, steps, max_steps, saving_listeners))
            return self
        strategy = training_strategy(self._config)  # joins a cluster before JAX is used
        latest = self.latest_checkpoint()
        if latest is not None and max_steps is not None and self._step_of(latest) >= max_steps:
            self._models.skip_training(strategy)
            return self
        self._set_seed()
        model = self._models.under(strategy)
        source = self._input(input_fn, ModeKeys.TRAIN, repeats=True)
        self._train(model, source, hooks, saving_listeners, last_step)
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
            input_fn: returns the evaluation data.
            steps: the number of global batches; None for all.
            hooks: called around each step.
            checkpoint_path: the checkpoint; None for the latest.
            name: distinguishes several evaluations; becomes part of the folder name.

        Returns:
            A dict of the model function's metrics, the average `loss` over examples, and
            `global_step`.

        Raises:
            ValueError: if there is no checkpoint, `steps` is not positive, or there is no data.

        Source: tensorflow/estimator estimator.py, Estimator.evaluate.
        """
        check_minimum("steps", steps, 1)
        loop_hooks = check_instances("hooks", tuple(hooks or ()), SessionRunHook)
        path = self._checkpoint_to_use(checkpoint_path)
        self._set_seed()
        model = self._models.under(resolve_strategy(self._config.eval_distribute))
        source = self._input(input_fn, ModeKeys.EVAL, repeats=steps is not None)
        step = model.evaluation
        with contextlib.closing(ModelBatches(source, model.strategy)) as batches:
            first = batches.first()
            loop = InferenceLoop(step, first, model.checkpoints, self._model_dir, loop_hooks)
            limited = itertools.islice(batches.after(first), steps)
            for _ in loop.run(limited, lambda: self._initialize(model, path)):
                pass
        results: dict[str, Any] = {
            key: np.asarray(value)[()] for key, value in step.results().items()
        }
        global_step = loop.session.global_step
        write_results(self.eval_dir(name), results, global_step)
        results["global_step"] = global_step
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
        """Yields predictions in input order.

        Runs on one device of this process, whatever the strategies. With several workers, each
        predicts its own `input_fn`'s data. All must call it: they read the checkpoint together.

        Args:
            input_fn: returns features; labels are ignored.
            predict_keys: the predictions to return, if the model function returns a dict; None for
                all.
            hooks: called around each step.
            checkpoint_path: the checkpoint; None for the latest.
            yield_single_examples: True to yield one example at a time, False for whole batches.

        Yields:
            An array or a dict of arrays: the predictions of one example, or of one batch.

        Raises:
            ValueError: if there is no checkpoint, a key is unknown, or a prediction does not have
                one row per example.

        Source: tensorflow/estimator estimator.py, Estimator.predict.
        """
        loop_hooks = check_instances("hooks", tuple(hooks or ()), SessionRunHook)
        path = self._checkpoint_to_use(checkpoint_path)
        self._set_seed()
        model = self._models.under(None)
        source = self._input(input_fn, ModeKeys.PREDICT, repeats=False)
        step = model.prediction
        with contextlib.closing(ModelBatches(source, model.strategy)) as batches:
            first = batches.first()
            loop = InferenceLoop(
                step, (first[0], None), model.checkpoints, self._model_dir, loop_hooks
            )
            keys = select_keys(loop.spec.predictions, predict_keys)
            unlabeled = ((features, None) for features, _ in batches.after(first))
            for values in loop.run(unlabeled, lambda: self._initialize(model, path)):
                per_replica = prediction_batches(model.strategy, values["predictions"], keys)
                for batch in map(self._host_transforms.decode_predictions, per_replica):
                    yield from split_examples(batch) if yield_single_examples else (batch,)

    def export_saved_model(
        self,
        export_dir_base: str | os.PathLike[str],
        serving_input_receiver_fn: Callable[[], Any],
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
        checkpoint_path: str | None = None,
        experimental_mode: str = ModeKeys.PREDICT,
    ) -> str:
        """Exports prediction as compiled programs that `load_exported` runs without the model code.

        The programs are StableHLO for CPU, CUDA GPU and TPU, for any batch size. Each of the
        spec's `export_outputs` becomes a signature. Without any, the predictions become the
        signature "serving_default". Call on every worker.

        Args:
            export_dir_base: the parent folder of exports.
            serving_input_receiver_fn: returns a `ServingInputReceiver`, which describes the inputs.
            assets_extra: files to copy: paths inside the folder "assets.extra" to source paths.
            as_text: True to also write the programs as readable MLIR.
            checkpoint_path: the checkpoint; None for the latest.
            experimental_mode: "infer".

        Returns:
            The path of the new export; its last component is the time in seconds.

        Raises:
            NotImplementedError: if `experimental_mode` is not "infer".
            TypeError: if the receiver or an export output has the wrong type.
            ValueError: if there is no checkpoint, or the model function cannot be traced for an
                arbitrary batch size.

        Source: tensorflow/estimator estimator.py, Estimator.export_saved_model.
        """
        _check_exported_mode(experimental_mode)
        path = self._checkpoint_to_use(checkpoint_path)
        receiver = check_receiver(serving_input_receiver_fn)
        model = self._models.under(None)
        self._make_exported(model, receiver, path)
        return write_export(
            os.fspath(export_dir_base),
            model.prediction,
            signatures_of(model.prediction, receiver),
            assets_extra or {},
            as_text=as_text,
        )

    def _train(
        self,
        model: DistributedModel,
        source: InputFunction,
        hooks: Sequence[SessionRunHook],
        saving_listeners: Sequence[Any] | None,
        last_step: Callable[[int], int | None],
    ) -> None:
        training.train(
            model,
            model.role.batches(source),
            self._config,
            initialize=lambda: self._initialize(model, self.latest_checkpoint()),
            make_hooks=lambda spec: training_hooks(
                spec, hooks, self._config, saving_listeners, model.role
            ),
            last_step=last_step,
        )

    def _make_exported(
        self, model: DistributedModel, receiver: ServingInputReceiver, path: str | None
    ) -> None:
        """Creates and initializes the variables of an exported model."""
        spec = make_variables(model.prediction, receiver)
        session = ModelSession(model.prediction, spec, model.checkpoints, self._model_dir)
        if not self._initialize(model, path) and spec.scaffold is not None:
            spec.scaffold.init_fn(session)

    def _input(self, input_fn: Callable[..., Any], mode: str, *, repeats: bool) -> InputFunction:
        return InputFunction(
            input_fn, mode, self.params, self._config, self._host_transforms, repeats=repeats
        )


def _check_exported_mode(mode: str) -> None:
    if mode != ModeKeys.PREDICT:
        raise NotImplementedError(
            explain(
                f"experimental_mode={mode!r} cannot be exported.",
                expected="'infer': exported variables are constant.",
                fix="train and evaluate with the Estimator itself.",
            )
        )


def _train_there(
    estimator: Estimator,
    input_fn: InputFunction,
    hooks: Sequence[SessionRunHook] | None,
    steps: int | None,
    max_steps: int | None,
    saving_listeners: Sequence[CheckpointSaverListener] | None,
) -> None:
    """Trains on one task of a remote cluster."""
    if estimator.config.task_type != "evaluator":
        estimator.train(input_fn, hooks, steps, max_steps, saving_listeners)
        close_strategies()
