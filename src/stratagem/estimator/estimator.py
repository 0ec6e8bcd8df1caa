"""Estimator: training, evaluation, prediction and export of a model function."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import keras
import numpy as np

from stratagem.checkpoint.checkpoint import Checkpoint
from stratagem.checkpoint.latest import is_first, run_on_first
from stratagem.checkpoint.storage.files import is_whole
from stratagem.cluster.roles import task_count
from stratagem.cluster.spec import ClusterSpec
from stratagem.errors import check_number, check_type, invalid
from stratagem.estimator.checks import (
    check_instances,
    check_known,
    check_one_of,
    check_unsupported,
)
from stratagem.estimator.export import export_prediction
from stratagem.estimator.hooks import SessionRunHook
from stratagem.estimator.inputs import Encode, InputFunction, ModelBatches
from stratagem.estimator.loops import (
    DistributedModel,
    Session,
    TrainingSummaries,
    hooked_steps,
    training_hooks,
    training_role,
    write_eval_metrics,
    write_results,
)
from stratagem.estimator.run_config import (
    RunConfig,
    close_strategies,
    resolve_strategy,
    training_strategy,
)
from stratagem.estimator.spec import EstimatorSpec, ModeKeys, ModelFunction, arguments_of
from stratagem.estimator.steps import (
    VARIABLES,
    ModelStep,
    VariableStore,
    latest_checkpoint,
    prediction_batches,
    read_names,
    read_variable,
    select_keys,
    spec_hooks,
    split_examples,
)
from stratagem.launch.remote.remote_cluster import RemoteCluster
from stratagem.resources import checked_folder
from stratagem.strategies.mirrored import OneDeviceStrategy
from stratagem.strategies.strategy import Strategy

if TYPE_CHECKING:
    pass


# Warm start: initial values of variables from an earlier training run.


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
        check_unsupported("var_name_to_vocab_info", self.var_name_to_vocab_info or None)


def warm_start(store: VariableStore, settings: WarmStartSettings) -> None:
    """Initializes the selected variables from the checkpoint. Call on every process."""
    given = settings.ckpt_to_initialize_from
    path = given if is_whole(Path(given)) else latest_checkpoint(given)
    if path is None:
        raise ValueError(
            f"{given} is neither an Estimator's checkpoint nor the model_dir of a trained one."
        )
    renamed = dict(settings.var_name_to_prev_var_name or {})
    chosen = _chosen(store, settings.vars_to_warm_start)
    check_known("var_name_to_prev_var_name", renamed, chosen)
    left = [(renamed.get(name, name), variable) for name, variable in chosen.items()]
    while left:  # several variables may read the same entry of the checkpoint
        round_ = dict(reversed(left))
        Checkpoint(**{VARIABLES: round_}).read(path).expect_partial()
        left = [pair for pair in left if round_[pair[0]] is not pair[1]]


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
                f"vars_to_warm_start={one!r} matches no variable of {sorted(named)}; a list may "
                "also match those that are not trainable."
            )
        chosen |= found
    return chosen


def check_members(cls: type, base: type) -> None:
    """Raises ValueError if a subclass overrides a member of Estimator other than `__init__`."""
    members = {name for one in base.__mro__ for name in vars(one) if not name.startswith("__")}
    overridden = sorted(
        {name for one in cls.__mro__[: cls.__mro__.index(base)] for name in vars(one)} & members
    )
    if overridden:
        raise ValueError(
            f"{cls.__name__} overrides the Estimator members {overridden}: move the code into the "
            "model function, a hook, or a function that calls the Estimator."
        )


def resolve_model_dir(model_dir: str | os.PathLike[str] | None, config: RunConfig) -> str | None:
    """Returns the folder of the argument or the config, or None; an evaluator must have one."""
    folder = config.model_dir if model_dir is None else checked_folder("model_dir", model_dir)
    if folder is None and config.task_type == "evaluator":
        raise ValueError("The evaluator task has no model_dir: pass that of the other tasks.")
    if config.model_dir not in (None, folder):
        raise ValueError(
            f"model_dir={folder!r} differs from the config's model_dir={config.model_dir!r}: set "
            "only one of the two."
        )
    return folder


class Estimator:
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
        config = RunConfig() if config is None else config
        check_type("config", config, RunConfig, "an sg.estimator.RunConfig")
        folder = resolve_model_dir(model_dir, config)
        if folder is None:
            folder = run_on_first("Estimator", tempfile.mkdtemp)
        self._config = config.replace(model_dir=folder)
        self._model_dir = folder
        self._params = copy.deepcopy(params)
        self._function = ModelFunction(model_fn, self._params, self._config)
        self._models: dict[Strategy, DistributedModel] = {}
        start: Any = warm_start_from
        if start is not None and not isinstance(start, WarmStartSettings):
            start = WarmStartSettings(os.fspath(start))
        self._warm_start: WarmStartSettings | None = start
        # On the host: of batches before the model function, and of predictions after it.
        self._encode: Encode | None = None
        self._decode: Callable[[Any], Any] | None = None
        self._one_device: Strategy | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the variables: another process creates its own."""
        return {**vars(self), "_models": {}, "_one_device": None}

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
        """True if the model function's scaffolds give all values, as converted Keras models do."""
        return bool(getattr(self._function.function, "gives_values", False))

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
        check_number("train", or_none=True, steps=steps, max_steps=max_steps)
        check_one_of("train", is_required=False, steps=steps, max_steps=max_steps)
        hooks = check_instances("hooks", tuple(hooks or ()), SessionRunHook)
        if remote_cluster_of(self._config) is not None:
            run_remotely(self, _train_there, (input_fn, hooks, steps, max_steps, saving_listeners))
            return self
        strategy = training_strategy(self._config)  # joins a cluster before JAX is used
        latest = self.latest_checkpoint()
        trained = read_variable(latest, "global_step") if latest and max_steps else 0
        if max_steps is not None and trained >= max_steps:
            if strategy is not None:  # other tasks don't wait for this run
                training_role(strategy).skip()
            return self
        self._set_seed()
        model, config = self._model_under(strategy), self._config
        role, training = model.role, model.training
        summaries = TrainingSummaries(
            self._model_dir, config.save_summary_steps if role.saves else None
        )
        batches = role.batches(self._input(input_fn, ModeKeys.TRAIN, repeats=True))
        with contextlib.closing(batches), summaries.written():
            first = batches.first()
            role.wait(config.session_creation_timeout_secs)
            spec = training.prepare(first)
            session = Session(model, training, summaries.writer)

            def limited() -> Iterator[Any]:
                start, unread = session.global_step, batches.after(first)
                last = max_steps if steps is None else start + steps
                for num_steps in itertools.count():
                    # Other workers may count, too. No batch is read without being trained on.
                    if last is not None and max(session.global_step, start + num_steps) >= last:
                        return
                    if (batch := next(unread, None)) is None:
                        return
                    yield batch

            def step(batch: Any) -> None:
                model.checkpoints.forget()
                with summaries.of_step(session.global_step + 1):
                    values = role.run(training, batch)
                session.finish_step(values, num_trained=1)

            def finish() -> None:
                if (values := role.finish()) is not None:
                    session.finish_step(values)
                    session.read_global_step()

            for _ in hooked_steps(
                session,
                training_hooks(spec, hooks, config, saving_listeners, role),
                limited(),
                step,
                lambda: role.begin(lambda: self._initialize(model, self.latest_checkpoint())),
                finish,
            ):
                pass
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
        check_number("evaluate", or_none=True, steps=steps)
        model = self._model_under(resolve_strategy(self._config.eval_distribute))
        step = model.evaluation
        for _ in self._infer(model, step, input_fn, hooks, checkpoint_path, steps):
            pass
        results: dict[str, Any] = {
            key: np.asarray(value)[()] for key, value in step.results().items()
        }
        global_step = int(model.store.global_step)
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
        model = self._model_under(None)
        step = model.prediction
        keys: list[str] | None = None

        def choose_keys(spec: EstimatorSpec) -> None:
            nonlocal keys
            keys = select_keys(spec.predictions, predict_keys)

        for values in self._infer(
            model, step, input_fn, hooks, checkpoint_path, traced=choose_keys
        ):
            for batch in prediction_batches(model.strategy, values["predictions"], keys):
                rows = batch if self._decode is None else self._decode(batch)
                yield from split_examples(rows) if yield_single_examples else (rows,)

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
        if experimental_mode != ModeKeys.PREDICT:
            raise NotImplementedError(
                f"experimental_mode={experimental_mode!r} cannot be exported, only 'infer'."
            )
        path = self._checkpoint_to_use(checkpoint_path)
        model = self._model_under(None)

        def initialize(spec: EstimatorSpec) -> None:
            if not self._initialize(model, path) and spec.scaffold is not None:
                spec.scaffold.init_fn(Session(model, model.prediction))

        return export_prediction(
            model.prediction,
            serving_input_receiver_fn,
            initialize,
            os.fspath(export_dir_base),
            assets_extra or {},
            as_text=as_text,
        )

    def _model_under(self, strategy: Strategy | None) -> DistributedModel:
        """Returns the model under a strategy; None means JAX's default device."""
        if strategy is None:
            if self._one_device is None:
                device: Any = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
                self._one_device = OneDeviceStrategy(device or jax.local_devices()[0])
            strategy = self._one_device
        if strategy not in self._models:
            self._models[strategy] = DistributedModel(
                self._function, strategy, self._model_dir, self._config
            )
        return self._models[strategy]

    def _infer(
        self,
        model: DistributedModel,
        step: ModelStep,
        input_fn: Callable[..., Any],
        hooks: Sequence[SessionRunHook] | None,
        checkpoint_path: str | None,
        num_steps: int | None = None,
        traced: Callable[[EstimatorSpec], None] = lambda spec: None,
    ) -> Iterator[Any]:
        """Yields the values of steps that don't train, with the variables of a checkpoint.

        `traced` is called with the spec, before the hooks' `begin`.
        """
        own_hooks = check_instances("hooks", tuple(hooks or ()), SessionRunHook)
        path = self._checkpoint_to_use(checkpoint_path)
        self._set_seed()
        source = self._input(input_fn, step.mode, repeats=num_steps is not None)
        with contextlib.closing(ModelBatches(source, model.strategy)) as batches:
            first = batches.first()
            limited = itertools.islice(batches.after(first), num_steps)
            if step.mode == ModeKeys.PREDICT:
                first, limited = (first[0], None), ((features, None) for features, _ in limited)
            traced(step.prepare(first))
            session = Session(model, step)
            step.reset()

            def run(batch: tuple[Any, Any]) -> Any:
                values = step.run(batch)
                session.finish_step(values)
                return values

            yield from hooked_steps(
                session,
                [*own_hooks, *spec_hooks(session.spec, step.mode)],
                limited,
                run,
                initialize=lambda: self._initialize(model, path),
            )

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
            raise invalid(
                f"{self._model_dir} contains no checkpoint.",
                "a trained Estimator, or checkpoint_path.",
                "call train first, or pass the model_dir of a trained model.",
            )
        return found

    def _set_seed(self) -> None:
        if self._config.tf_random_seed is not None:
            keras.utils.set_random_seed(self._config.tf_random_seed)

    def _input(self, input_fn: Callable[..., Any], mode: str, *, repeats: bool) -> InputFunction:
        return InputFunction(
            input_fn, mode, self.params, self._config, self._encode, repeats=repeats
        )


def _train_there(estimator: Estimator, *arguments: Any) -> None:
    """Trains on one task of a remote cluster."""
    if estimator.config.task_type != "evaluator":
        estimator.train(*arguments)
        close_strategies()


# add_metrics: extra evaluation metrics for an existing Estimator.


class _WithMetrics(Estimator):
    def __init__(self, other: Estimator, model_fn: Callable[..., EstimatorSpec]) -> None:
        super().__init__(model_fn, config=other.config, warm_start_from=other._warm_start)
        self._encode, self._decode = other._encode, other._decode


def add_metrics(estimator: Estimator, metric_fn: Callable[..., Mapping[str, Any]]) -> Estimator:
    """Returns an Estimator that also evaluates the metrics of `metric_fn`.

    It shares the folder and the settings of the original Estimator.

    Args:
        estimator: any Estimator; its model function is reused.
        metric_fn: takes any of `features`, `labels`, `predictions` and `config` by name, as the
            model function sees them. Returns a dict from names to Keras metrics, which it creates
            and updates in each call. A metric replaces an existing one of the same name.

    Returns:
        A new Estimator.

    Raises:
        ValueError: if `metric_fn` takes other arguments.

    Example:
        >>> column = sg.feature_column.numeric_column("x")
        >>> estimator = sg.estimator.LinearRegressor([column])
        >>> def largest(labels, predictions):
        ...     metric = keras.metrics.MeanAbsoluteError()
        ...     metric.update_state(labels, predictions["predictions"])
        ...     return {"error": metric}
        >>> estimator = sg.estimator.add_metrics(estimator, largest)
        >>> batch = {"x": np.ones(4, "float32")}, np.ones((4, 1), "float32")
        >>> "error" in estimator.train(lambda: batch, steps=1).evaluate(lambda: batch)
        True

    Source: tensorflow/estimator extenders.py, add_metrics.
    """
    takes, inner_fn = arguments_of(metric_fn), estimator.model_fn
    known = ("features", "labels", "predictions", "config")
    check_known("The arguments of metric_fn", takes, known)

    def model_fn(features: object, labels: object, mode: str, config: object) -> EstimatorSpec:
        spec = inner_fn(features, labels, mode, config)
        if mode != ModeKeys.EVAL:
            return spec
        given = (features, labels, spec.predictions, config)
        values: dict[str, Any] = dict(zip(known, given, strict=True))
        metrics = metric_fn(**{name: values[name] for name in takes})
        return dataclasses.replace(
            spec, eval_metric_ops={**(spec.eval_metric_ops or {}), **metrics}
        )

    model_fn.gives_values = estimator.gives_values  # pyright: ignore[reportFunctionMemberAccess]
    return _WithMetrics(estimator, model_fn)


# Standalone clients: an Estimator's work on a remote cluster.


def remote_cluster_of(config: RunConfig) -> ClusterSpec | None:
    """Returns the cluster that this program is a client of, or None."""
    both = config.experimental_distribute
    cluster: Any = None if both is None else both.remote_cluster
    return cluster


def run_remotely(estimator: Estimator, work: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Calls a function with a copy of the Estimator: on the coordinator, or else on every task."""
    cluster = remote_cluster_of(estimator.config)
    assert cluster is not None
    has_evaluator = not task_count(cluster, "ps") and task_count(cluster, "evaluator") > 0
    return RemoteCluster(cluster).run(
        work, (estimator, *arguments), answer_of=("evaluator", 0) if has_evaluator else None
    )
