"""RunConfig: output folder, intervals, cluster task and strategies of an Estimator."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import numbers
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from stratagem import environment
from stratagem.cluster.processes import check_cluster
from stratagem.cluster.resolvers.tf_config import TFConfigClusterResolver, tf_config
from stratagem.cluster.roles import is_chief, normalize_cluster_spec, task_count
from stratagem.cluster.spec import ClusterSpec
from stratagem.errors import check_choice, check_number, check_type, invalid
from stratagem.estimator.checks import check_known, check_one_of, check_unsupported
from stratagem.launch.remote.protocol import JOB_VARIABLE
from stratagem.parameter_server.strategy import ParameterServerStrategy
from stratagem.resources import Closing, checked_folder
from stratagem.strategies.strategy import Strategy

# DistributeConfig: strategies for training and evaluation.


@dataclasses.dataclass(frozen=True, eq=False)
class DistributeConfig:
    """Strategies for training and evaluation, and the cluster of a standalone client.

    Args:
        train_distribute: the training strategy, or a function without arguments that creates it,
            such as a strategy class; None for one device.
        eval_distribute: the evaluation strategy, in the same form.
        remote_cluster: a cluster to run on as a client, without being one of its tasks: a
            `ClusterSpec`, or a dict that it accepts.

    Raises:
        TypeError: if a strategy has the wrong type.
        ValueError: if `remote_cluster` is not a valid cluster.

    Example:
        >>> strategy = sg.MirroredStrategy()
        >>> both = sg.estimator.DistributeConfig(strategy, strategy)
        >>> sg.estimator.RunConfig(experimental_distribute=both).eval_distribute is strategy
        True

    Source: TF 2.21 distribute_config.py, DistributeConfig.
    """

    train_distribute: Strategy | Callable[[], Strategy] | None = None
    eval_distribute: Strategy | Callable[[], Strategy] | None = None
    remote_cluster: ClusterSpec | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_strategy("train_distribute", self.train_distribute)
        check_strategy("eval_distribute", self.eval_distribute)
        if self.remote_cluster is not None:
            spec = normalize_cluster_spec(self.remote_cluster)
            object.__setattr__(self, "remote_cluster", spec)


def check_strategy(name: str, strategy: object) -> None:
    """Raises TypeError unless the argument is a strategy, a callable or None."""
    if strategy is not None and not callable(strategy):
        check_type(name, strategy, Strategy, "a strategy or a function that returns one")


# Task of this process in the `TF_CONFIG` cluster, as an Estimator uses it.


def _cluster_task(*, needs_chief: bool) -> dict[str, Any]:
    """Reads this process's task from `TF_CONFIG`, as TensorFlow's run_config.py does."""
    resolver = TFConfigClusterResolver()
    spec, task_type, task_id = resolver.cluster_spec(), resolver.task_type, resolver.task_id
    if not spec:
        if (task_type or "worker", task_id or 0) != ("worker", 0):
            raise ValueError(
                f"TF_CONFIG has task type {task_type!r} and index {task_id!r} but no cluster: add "
                '"cluster" to it, or remove "task".'
            )
        master = str(tf_config().get("session_master", ""))
        return {"master": master, "num_worker_replicas": 1, "is_chief": True}
    if needs_chief and not task_count(spec, "chief"):
        raise invalid(
            f"TF_CONFIG describes a cluster without a chief: {spec!r}.",
            expected='one task in the job "chief", because no strategy is set.',
            fix='rename worker 0 to "chief", or pass RunConfig(train_distribute=strategy).',
            code="SG902",
        )
    if task_type is None or task_id is None:
        raise ValueError(
            f"The cluster is known, but its task has type {task_type!r} and index {task_id!r}: "
            'add "task": {"type": "worker", "index": 0} to TF_CONFIG, for example.'
        )
    check_cluster(spec, task_type, task_id)
    task = {"task_type": task_type, "task_id": task_id}
    if task_type == "evaluator":  # not part of the training cluster
        return task
    return {
        **task,
        "cluster_spec": spec,
        "master": resolver.master(rpc_layer=resolver.rpc_layer or "grpc"),
        "num_ps_replicas": task_count(spec, "ps"),
        "num_worker_replicas": task_count(spec, "chief") + task_count(spec, "worker"),
        "is_chief": is_chief(spec, task_type, task_id),
    }


_DEFAULT_SAVE_SECS: Final = 600

# Tells "not passed" from None, since passing one interval disables the other.
_UNSET: Any = object()
_EMPTY: Final = ClusterSpec({})

_COUNTS: Final = (
    "save_summary_steps",
    "save_checkpoints_steps",
    "keep_checkpoint_max",
    "experimental_max_worker_delay_secs",
)


@dataclasses.dataclass(frozen=True, eq=False)
class RunConfig:
    """Settings of an Estimator's runs.

    The cluster is read from `TF_CONFIG` when the object is created.

    Args:
        model_dir: the folder of checkpoints and summaries; None for the one named by the Estimator
            or `TF_CONFIG`.
        tf_random_seed: the global random seed; None for a different one in each run.
        save_summary_steps: steps between summaries; None or 0 for no summaries.
        save_checkpoints_steps: steps between checkpoints; excludes `save_checkpoints_secs`.
        save_checkpoints_secs: seconds between checkpoints, 600 if neither is set. If both are None,
            no checkpoints are saved.
        session_config: ignored; there are no sessions to configure.
        keep_checkpoint_max: the number of checkpoints to keep; None or 0 for all.
        keep_checkpoint_every_n_hours: also keep one checkpoint per this many hours.
        log_step_count_steps: steps between log lines with the loss and the speed; None for none.
        train_distribute: the training strategy, or a function without arguments that creates it in
            the tasks that train, such as a strategy class. None means one device, or
            `ParameterServerStrategy(independent=True)` in a cluster with parameter servers.
        device_fn: must be None; strategies place variables.
        protocol: None, "grpc" or "grpc+verbs"; ignored.
        eval_distribute: the evaluation strategy in the same form; None for one device.
        experimental_distribute: both strategies, and the cluster of a standalone client.
        experimental_max_worker_delay_secs: the longest startup delay of a worker, in seconds; None
            for 60.
        session_creation_timeout_secs: how long workers wait for the chief to create the variables.
        checkpoint_save_graph_def: ignored; there is no graph.

    Attributes:
        cluster_spec: the training cluster; empty for a single process or an evaluator.
        task_type: this process's task type: "chief", "worker", "ps" or "evaluator".
        task_id: the index of this task within its type.
        is_chief: True if this process writes checkpoints and summaries.
        master: the address of this process; "" for a single process.
        num_ps_replicas: the number of parameter servers.
        num_worker_replicas: the number of tasks that train, including the chief.

    Raises:
        NotImplementedError: if `device_fn` is set.
        TypeError: if a strategy has the wrong type.
        ValueError: if a number is out of range, both checkpoint intervals are set, a strategy is
            set twice, the protocol is unknown, or `TF_CONFIG` is invalid.

    Example:
        >>> config = sg.estimator.RunConfig(save_checkpoints_steps=500)
        >>> config.save_checkpoints_secs, config.task_type, config.is_chief
        (None, 'worker', True)

    Source: tensorflow/estimator run_config.py, RunConfig.
    """

    model_dir: str | None = None
    tf_random_seed: int | None = None
    save_summary_steps: int | None = 100
    save_checkpoints_steps: int | None = _UNSET
    save_checkpoints_secs: float | None = _UNSET
    session_config: Any = None
    keep_checkpoint_max: int | None = 5
    keep_checkpoint_every_n_hours: float = 10000
    log_step_count_steps: int | None = 100
    train_distribute: Strategy | Callable[[], Strategy] | None = None
    device_fn: Callable[..., Any] | None = None
    protocol: str | None = None
    eval_distribute: Strategy | Callable[[], Strategy] | None = None
    experimental_distribute: DistributeConfig | None = None
    experimental_max_worker_delay_secs: int | None = None
    session_creation_timeout_secs: float = 7200
    checkpoint_save_graph_def: bool = True
    # Values of a process outside the training cluster.
    cluster_spec: ClusterSpec = dataclasses.field(default=_EMPTY, init=False, repr=False)
    task_type: str = dataclasses.field(default="worker", init=False, repr=False)
    task_id: int = dataclasses.field(default=0, init=False, repr=False)
    is_chief: bool = dataclasses.field(default=False, init=False, repr=False)
    master: str = dataclasses.field(default="", init=False, repr=False)
    num_ps_replicas: int = dataclasses.field(default=0, init=False, repr=False)
    num_worker_replicas: int = dataclasses.field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        given = (self.model_dir, tf_config().get("model_dir"))
        folders = {checked_folder("model_dir", one) for one in given if one is not None}
        if len(folders) > 1:
            raise ValueError(
                f"model_dir is {given[0]!r} in RunConfig and {given[1]!r} in TF_CONFIG: remove one."
            )
        object.__setattr__(self, "model_dir", folders.pop() if folders else None)
        self._choose_when_to_save()
        self._check_settings()
        self._choose_strategies()
        is_distributed = (self.train_distribute, self.eval_distribute) != (None, None)
        task = _cluster_task(needs_chief=not (is_distributed or self.experimental_distribute))
        for name, value in task.items():
            object.__setattr__(self, name, value)
        both = self.experimental_distribute
        if both is not None and both.remote_cluster is not None and self.cluster_spec:
            raise ValueError(
                "remote_cluster is set, but TF_CONFIG makes this process a task of "
                f"{self.cluster_spec!r}: unset TF_CONFIG in the client, or remove remote_cluster."
            )

    def _choose_when_to_save(self) -> None:
        steps, secs = self.save_checkpoints_steps, self.save_checkpoints_secs
        if secs is _UNSET:
            secs = _DEFAULT_SAVE_SECS if steps is _UNSET else None
        steps = None if steps is _UNSET else steps
        check_one_of(
            "RunConfig", is_required=False, save_checkpoints_steps=steps, save_checkpoints_secs=secs
        )
        object.__setattr__(self, "save_checkpoints_steps", steps)
        object.__setattr__(self, "save_checkpoints_secs", secs)

    def _check_settings(self) -> None:
        owner, seed = "RunConfig", self.tf_random_seed
        check_type("tf_random_seed", seed, numbers.Integral | None, "an integer or None")
        for name in _COUNTS:
            check_number(owner, 0, or_none=True, **{name: getattr(self, name)})
        check_number(owner, or_none=True, log_step_count_steps=self.log_step_count_steps)
        check_number(owner, 0.0, or_none=True, save_checkpoints_secs=self.save_checkpoints_secs)
        hours, limit_s = self.keep_checkpoint_every_n_hours, self.session_creation_timeout_secs
        check_number(owner, above=0, keep_checkpoint_every_n_hours=hours)
        check_number(owner, above=0, session_creation_timeout_secs=limit_s)
        check_unsupported("device_fn", self.device_fn)
        check_choice(owner, (None, "grpc", "grpc+verbs"), protocol=self.protocol)

    def _choose_strategies(self) -> None:
        both = self.experimental_distribute
        check_type("experimental_distribute", both, DistributeConfig | None, "a DistributeConfig")
        for name in ("train_distribute", "eval_distribute"):
            direct, other = getattr(self, name), getattr(both, name, None)
            check_strategy(name, direct)
            if other is None:
                continue
            if direct is not None and direct is not other:
                raise ValueError(
                    f"{name} is set both directly and in experimental_distribute: remove one."
                )
            object.__setattr__(self, name, other)

    @property
    def _settings(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.init}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the settings; the receiver creates strategies and reads `TF_CONFIG` itself."""
        settings = self._settings
        for name in ("train_distribute", "eval_distribute"):
            # Recreated where the settings are read, if it can be.
            settings[name] = getattr(settings[name], "recreate", None) or settings[name]
        both = None if self.experimental_distribute is None else DistributeConfig()
        settings["experimental_distribute"] = both
        return functools.partial(type(self), **settings), ()

    def replace(self, **changes: Any) -> RunConfig:
        """Returns a copy with some settings replaced.

        Reads `TF_CONFIG` again. Setting one of `save_checkpoints_steps` and `save_checkpoints_secs`
        sets the other to None.

        Args:
            **changes: arguments of `RunConfig`.

        Returns:
            A new config.

        Raises:
            TypeError: as for `RunConfig`.
            ValueError: if a name is unknown, or as for `RunConfig`.

        Example:
            >>> sg.estimator.RunConfig().replace(save_checkpoints_steps=10).save_checkpoints_secs
        """
        before = self._settings
        check_known("RunConfig.replace", changes, before)
        if "experimental_distribute" in changes:
            for name in ("train_distribute", "eval_distribute"):
                if getattr(self.experimental_distribute, name, None) is before[name]:
                    before[name] = None
        if changes.get("save_checkpoints_steps") is not None:
            before["save_checkpoints_secs"] = None
        if changes.get("save_checkpoints_secs") is not None:
            before["save_checkpoints_steps"] = None
        return cast(RunConfig, type(self)(**(before | changes)))


# Training strategy of an Estimator, created in the process that uses it.


# TensorFlow's default in a cluster with parameter servers.
_INDEPENDENT_WORKERS = functools.partial(ParameterServerStrategy, independent=True)

# All Estimators of this process that name the same factory share its strategy.
_strategies: dict[Callable[[], Any], Strategy] = {}


def training_strategy(config: RunConfig) -> Strategy | None:
    """Returns this process's training strategy, creating it if necessary; None for one device."""
    strategy = config.train_distribute
    if strategy is None and config.num_ps_replicas:
        # A job sent by a client runs once in such a cluster, not in each worker.
        is_sent = environment.lookup(JOB_VARIABLE) is not None
        strategy = ParameterServerStrategy if is_sent else _INDEPENDENT_WORKERS
    if strategy is None and config.num_worker_replicas > 1:
        raise invalid(
            f"{config.num_worker_replicas} tasks of {config.cluster_spec!r} cannot train "
            "together without a strategy or parameter servers.",
            expected="a multi-worker strategy, or parameter servers in TF_CONFIG.",
            fix="pass RunConfig(train_distribute=sg.MultiWorkerMirroredStrategy), or add ps "
            "tasks to TF_CONFIG.",
            code="SG902",
        )
    return resolve_strategy(strategy)


def resolve_strategy(factory: Strategy | Callable[[], Any] | None) -> Strategy | None:
    """Returns a strategy; a factory is called once per process, and None stays None."""
    if factory is None or isinstance(factory, Strategy):
        return factory
    if factory not in _strategies:
        strategy = factory()
        check_type(f"The result of {factory!r}", strategy, Strategy, "a strategy")
        _strategies[factory] = strategy
        atexit.unregister(_close_at_exit)
        atexit.register(_close_at_exit)  # runs before the strategy's own exit handlers
    return _strategies[factory]


def close_strategies() -> None:
    """Closes all strategies created by factories; parameter servers end with their leader."""
    while _strategies:
        _, strategy = _strategies.popitem()
        if isinstance(strategy, Closing):
            strategy.close()


def _close_at_exit() -> None:
    """Closes strategies, waiting for other workers, unless this program failed."""
    if getattr(sys, "last_value", None) is None:
        close_strategies()
