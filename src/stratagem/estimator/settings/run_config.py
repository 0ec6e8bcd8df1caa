"""How an Estimator runs: where it writes, how often, and under which strategies."""

from __future__ import annotations

import dataclasses
import functools
import numbers
import os
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from stratagem.cluster import ClusterSpec
from stratagem.estimator.settings.cluster_task import ClusterTask, cluster_task, model_dir_of_task
from stratagem.estimator.settings.distribute_config import DistributeConfig, check_strategy
from stratagem.messages import explain
from stratagem.strategies import Strategy

__all__ = ["RunConfig"]

_DEFAULT_SAVE_SECS: Final = 600

# What "no argument" is for the two of which only one may be set.
_UNSET: Any = object()

# Whether a number has to be whole, and what it has to be.
_NUMBERS: Final = {
    "tf_random_seed": (True, None),
    "save_summary_steps": (True, "at least 0"),
    "save_checkpoints_steps": (True, "at least 0"),
    "save_checkpoints_secs": (False, "at least 0"),
    "keep_checkpoint_max": (True, "at least 0"),
    "keep_checkpoint_every_n_hours": (False, "above 0"),
    "log_step_count_steps": (True, "above 0"),
    "experimental_max_worker_delay_secs": (True, "at least 0"),
    "session_creation_timeout_secs": (False, "above 0"),
}


@dataclasses.dataclass(frozen=True, eq=False)
class RunConfig:
    """The settings of an Estimator's runs.

    What is known of the cluster is read from `TF_CONFIG` when the object is made.

    Args:
        model_dir: the folder of checkpoints and summaries; None for the one that the Estimator or
            `TF_CONFIG` names.
        tf_random_seed: the seed of everything random; None for another one in each run.
        save_summary_steps: steps between two summaries; None or 0 for none.
        save_checkpoints_steps: steps between two checkpoints; not together with seconds.
        save_checkpoints_secs: seconds between two checkpoints; 600 where neither is given. With
            both None checkpoints are not saved.
        session_config: kept, and not used: there are no sessions to configure.
        keep_checkpoint_max: how many checkpoints to keep; None or 0 for all.
        keep_checkpoint_every_n_hours: of those that are not kept otherwise, one in so many hours.
        log_step_count_steps: steps between two lines about the loss and the speed; None for none.
        train_distribute: the strategy of training, or a function without arguments that makes it in
            the tasks that train, such as its class. None for one device; in a cluster with
            parameter servers for `ParameterServerStrategy(independent=True)`.
        device_fn: None; the strategy decides where variables are.
        protocol: None, "grpc" or "grpc+verbs": kept, and not used.
        eval_distribute: the strategy of evaluation, or a function likewise; None for one device.
        experimental_distribute: both strategies, and the cluster of a standalone client.
        experimental_max_worker_delay_secs: the longest time that a worker waits before it starts;
            None for 60.
        session_creation_timeout_secs: how long workers wait for the chief to make the variables.
        checkpoint_save_graph_def: kept, and not used: there is no graph.

    Raises:
        TypeError: a strategy, a number or a setting of another type.
        ValueError: a number out of range, both ways to save, two strategies for one job, a
            `device_fn`, another protocol, or a `TF_CONFIG` that cannot be right.

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
    _task: ClusterTask = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._set_folder()
        self._choose_when_to_save()
        self._check_settings()
        self._choose_strategies()
        is_distributed = (self.train_distribute, self.eval_distribute) != (None, None)
        task = cluster_task(needs_chief=not (is_distributed or self.experimental_distribute))
        object.__setattr__(self, "_task", task)
        self._check_remote_cluster()

    def _set_folder(self) -> None:
        folder = None if self.model_dir is None else os.fspath(self.model_dir)
        object.__setattr__(self, "model_dir", model_dir_of_task(folder))

    def _choose_when_to_save(self) -> None:
        steps, secs = self.save_checkpoints_steps, self.save_checkpoints_secs
        if steps is _UNSET:
            steps = None
            secs = _DEFAULT_SAVE_SECS if secs is _UNSET else secs
        elif secs is _UNSET:
            secs = None
        if steps is not None and secs is not None:
            raise ValueError(
                explain(
                    f"save_checkpoints_steps={steps} and save_checkpoints_secs={secs} are both "
                    "set.",
                    expected="one of them at most.",
                    fix="leave the other one out.",
                )
            )
        object.__setattr__(self, "save_checkpoints_steps", steps)
        object.__setattr__(self, "save_checkpoints_secs", secs)

    def _check_settings(self) -> None:
        for name in _NUMBERS:
            self._check_number(name)
        if self.device_fn is not None:
            raise ValueError(
                explain(
                    f"device_fn={self.device_fn!r} would place operations on devices.",
                    expected="None: the strategy decides where variables are and where steps run.",
                    fix="pass train_distribute=sg.OneDeviceStrategy(device), or another strategy.",
                )
            )
        if self.protocol not in (None, "grpc", "grpc+verbs"):
            raise ValueError(
                explain(
                    f"protocol={self.protocol!r} is unknown.",
                    expected='"grpc", "grpc+verbs" or None.',
                    fix="leave it out: the strategies choose their own transport.",
                )
            )

    def _check_number(self, name: str) -> None:
        value = getattr(self, name)
        is_whole, allowed = _NUMBERS[name]
        if value is None:
            return
        kind = numbers.Integral if is_whole else numbers.Real
        if isinstance(value, bool) or not isinstance(value, kind):
            raise TypeError(
                explain(
                    f"{name}={value!r} is of type {type(value).__name__}.",
                    expected=f"{'a whole number' if is_whole else 'a number'}, or None.",
                    fix=f"pass a number as {name}, or leave it out.",
                )
            )
        if (allowed and value < 0) or (allowed == "above 0" and value == 0):
            raise ValueError(
                explain(
                    f"{name}={value} is out of range.",
                    expected=f"a number {allowed}.",
                    fix=f"correct {name}, or leave it out.",
                )
            )

    def _choose_strategies(self) -> None:
        both = self.experimental_distribute
        if both is not None and not isinstance(both, DistributeConfig):
            raise TypeError(
                explain(
                    f"experimental_distribute={both!r} is of type {type(both).__name__}.",
                    expected="a DistributeConfig.",
                    fix="pass sg.estimator.DistributeConfig(train_distribute=strategy).",
                )
            )
        for name in ("train_distribute", "eval_distribute"):
            own, other = getattr(self, name), getattr(both, name, None)
            check_strategy(name, own)
            if other is None:
                continue
            if own is not None and own is not other:
                raise ValueError(
                    explain(
                        f"{name} is set, and experimental_distribute sets it, too.",
                        expected="one of the two.",
                        fix=f"leave {name} out of one of them.",
                    )
                )
            object.__setattr__(self, name, other)

    def _check_remote_cluster(self) -> None:
        both = self.experimental_distribute
        if both is not None and both.remote_cluster is not None and self.cluster_spec:
            raise ValueError(
                explain(
                    "remote_cluster is set, and TF_CONFIG makes this process a task of "
                    f"{self.cluster_spec!r}.",
                    expected="a client of a cluster, or a task in one.",
                    fix="unset TF_CONFIG for the client, or leave remote_cluster out.",
                )
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """A process that it is sent to makes strategies of its own, and reads its `TF_CONFIG`.

        It is a task of the cluster that this one may be a client of.
        """
        settings = {field.name: getattr(self, field.name) for field in _settings_of(self)}
        makers = {name: _maker(settings[name]) for name in ("train_distribute", "eval_distribute")}
        both = None if self.experimental_distribute is None else DistributeConfig()
        settings |= {**makers, "experimental_distribute": both}
        return functools.partial(type(self), **settings), ()

    def replace(self, **changes: Any) -> RunConfig:
        """Returns a config with other settings.

        `TF_CONFIG` is read again. When one of `save_checkpoints_steps` and `save_checkpoints_secs`
        is set, the other one becomes None.

        Args:
            **changes: arguments of `RunConfig`.

        Returns:
            A new config.

        Raises:
            TypeError: as for a new one.
            ValueError: an unknown name, and as for a new one.

        Example:
            >>> sg.estimator.RunConfig().replace(save_checkpoints_steps=10).save_checkpoints_secs
        """
        settings = [field.name for field in _settings_of(self)]
        unknown = sorted(set(changes) - set(settings))
        if unknown:
            raise ValueError(
                explain(
                    f"RunConfig has no settings {unknown} that could be replaced.",
                    expected=f"names among {sorted(settings)}.",
                    fix="correct the names; what is read of the cluster follows from TF_CONFIG.",
                )
            )
        before: dict[str, Any] = {name: getattr(self, name) for name in settings}
        if "experimental_distribute" in changes:
            for name in ("train_distribute", "eval_distribute"):
                if getattr(self.experimental_distribute, name, None) is before[name]:
                    before[name] = None
        if changes.get("save_checkpoints_steps") is not None:
            before["save_checkpoints_secs"] = None
        if changes.get("save_checkpoints_secs") is not None:
            before["save_checkpoints_steps"] = None
        return cast(RunConfig, type(self)(**(before | changes)))

    @property
    def cluster_spec(self) -> ClusterSpec:
        """The cluster that trains; an empty one for a process by itself and the evaluator."""
        return self._task.cluster_spec

    @property
    def task_type(self) -> str:
        """What this process is: "chief", "worker", "ps" or "evaluator"."""
        return self._task.task_type

    @property
    def task_id(self) -> int:
        """Its index among those of its type."""
        return self._task.task_id

    @property
    def global_id_in_cluster(self) -> int | None:
        """Its number among all tasks of the cluster; None for the evaluator."""
        return self._task.global_id_in_cluster

    @property
    def is_chief(self) -> bool:
        """Whether this process is the one that writes."""
        return self._task.is_chief

    @property
    def master(self) -> str:
        """The address of this process; "" for one by itself."""
        return self._task.master

    @property
    def evaluation_master(self) -> str:
        """The address that evaluation connects to; "" unless `TF_CONFIG` names one."""
        return self._task.evaluation_master

    @property
    def num_ps_replicas(self) -> int:
        """How many parameter servers there are."""
        return self._task.num_ps_replicas

    @property
    def num_worker_replicas(self) -> int:
        """How many tasks train, the chief included."""
        return self._task.num_worker_replicas

    @property
    def service(self) -> Mapping[str, Any] | None:
        """What stands under `service` in `TF_CONFIG`."""
        return self._task.service


def _settings_of(config: RunConfig) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(config) if field.init]


def _maker(given: Any) -> Any:
    """What makes the same strategy elsewhere."""
    is_recreatable = isinstance(given, Strategy) and given.recreate is not None
    return given.recreate if is_recreatable else given
