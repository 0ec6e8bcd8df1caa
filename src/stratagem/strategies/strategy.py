"""`Strategy`, the base class: topology, placement, executor and cross-device ops."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Generator, Sequence
from typing import Any, NoReturn, ParamSpec, final

import jax
import numpy as np

from stratagem import contexts as stack
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.config import filters_traceback
from stratagem.contexts import StrategyParts
from stratagem.devices.finding import planned_topology, use_compilation_cache
from stratagem.devices.mesh import Topology, outside_context_mesh
from stratagem.devices.private import uncommitted
from stratagem.errors import (
    OLD_ARGUMENTS,
    OLD_METHODS,
    SAME_METHODS,
    check_type,
    explain,
    invalid,
    raise_reported,
    reported_errors,
)
from stratagem.execution.programs.lockstep import Lockstep
from stratagem.input.distributed import DistributedDataset
from stratagem.input.iterator import DistributedIterator
from stratagem.logs import warn_on_one_worker
from stratagem.options import InputContext, InputOptions, ReduceOp, RunOptions, ValueContext
from stratagem.strategies import datasets, reduction
from stratagem.strategies.cross_device_ops import AutomaticOps, CrossDeviceOps
from stratagem.strategies.extended import StrategyExtended
from stratagem.strategies.logical_devices import LogicalDevices
from stratagem.strategies.membership import copy_refused
from stratagem.strategies.self_description import SelfDescription
from stratagem.variables.components import agree_on_initial_values
from stratagem.variables.distributed import (
    DistributedValues,
    PerReplica,
    is_per_replica,
    regroup,
    select_replica,
)
from stratagem.variables.exhausted_memory import explain_exhausted_memory
from stratagem.variables.placement import Replicated
from stratagem.variables.registry import VariableRegistry

# TensorFlow's older names of strategy methods, from the table in `old_names`.


class OldMethods:
    """Resolves older names of a strategy's methods, which `dir` does not list."""

    def __getattr__(self, name: str) -> Any:
        kind = type(self).__name__
        if name in SAME_METHODS:
            new = SAME_METHODS[name]
            warn_on_one_worker(
                f"{kind}.{name} is an older name of {kind}.{new}.", DeprecationWarning, stacklevel=2
            )
            return getattr(self, new)
        if name in OLD_METHODS:
            raise AttributeError(
                explain(
                    f"{kind} has no method {name!r}.",
                    expected="TensorFlow's newer names.",
                    fix=f"write {OLD_METHODS[name]}.",
                )
            )
        raise AttributeError(f"{kind!r} object has no attribute {name!r}")


# Methods of a strategy that create, combine and take apart distributed values.


class ValueMethods(StrategyParts):
    """Methods of a strategy that convert between distributed and ordinary values."""

    @filters_traceback
    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: object,
        axis: int | tuple[int, ...] | list[int] | None,
    ) -> Any:
        """Combines the parts of a value over replicas. Call in cross-replica context.

        Args:
            reduce_op: "sum" or "mean".
            value: pytree with `PerReplica` leaves.
            axis: None to reduce over replicas only; one or several ints to reduce over those axes
                of a component as well, where MEAN divides by the true number of elements.

        Returns:
            The pytree with ordinary arrays; SUM keeps the dtype, MEAN of integers is a float.

        Raises:
            ValueError: unknown op, axis out of range, or a SUM of a plain value over several
                replicas.
            TypeError: axis of another type.
            InvalidArgumentError: parts of unequal shapes with `axis=None`.
            RuntimeError: in replica context; use `all_reduce` or `merge_call`.

        Example:
            >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> ids = strategy.run(lambda: sg.get_replica_context().replica_id_in_sync_group)
            >>> strategy.reduce("sum", ids, axis=None)
            Array(1, dtype=int32)

        Source: TF 2.21 distribute_lib.py, StrategyBase.reduce.
        """
        stack.require_cross_replica(
            self, "reduce", instead="use ReplicaContext.all_reduce, or call it in merge_call."
        )
        op = ReduceOp.parse(reduce_op)
        axes = reduction.parse_axes(axis)
        count = self.topology.num_replicas
        return _map(lambda leaf: reduction.reduce(op, leaf, axes, num_replicas=count), value)

    @filters_traceback
    def gather(self, value: object, axis: int) -> Any:
        """Concatenates the parts of a value in replica order. Call in cross-replica context.

        Args:
            value: pytree with `PerReplica` leaves, each part of shape (..., n_i, ...).
            axis: axis of a part, with -rank <= axis < rank.

        Returns:
            The pytree with ordinary arrays, size sum(n_i) at `axis`, true rows only; plain values
            unchanged.

        Raises:
            ValueError: rank 0, or axis out of range.
            InvalidArgumentError: parts whose ranks or other sizes differ.
            NotImplementedError: `IndexedSlices`.
            RuntimeError: in replica context; use `all_gather`.

        Example:
            >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> value = strategy.distribute_values_from_function(lambda _: jax.numpy.ones(2))
            >>> strategy.gather(value, axis=0).shape
            (4,)

        Source: TF 2.21 distribute_lib.py, StrategyBase.gather.
        """
        stack.require_cross_replica(self, "gather", instead="use ReplicaContext.all_gather.")
        count = self.topology.num_replicas
        return _map(lambda leaf: reduction.gather(leaf, axis, num_replicas=count), value)

    concat = gather

    @filters_traceback
    def local_results(self, value: object) -> tuple[Any, ...]:
        """Returns the parts of a value that this process holds. Call in cross-replica context.

        Args:
            value: a `PerReplica`, a pytree with such leaves, or any other value.

        Returns:
            Tuple of its components, true rows only; for a pytree, one pytree per replica of this
            process; `(value,)` for a value that is not distributed. An array stays on its replica's
            device until it is used; then JAX moves it to where it is needed.

        Raises:
            RuntimeError: in replica context.

        Example:
            >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> ids = strategy.run(lambda: sg.get_replica_context().replica_id_in_sync_group)
            >>> sum(strategy.local_results(ids))
            Array(1, dtype=int32)
            >>> strategy.local_results(7)
            (7,)

        Source: TF 2.21 distribute_lib.py, StrategyBase.experimental_local_results.
        """
        stack.require_cross_replica(
            self, "local_results", instead="use the value: it is this replica's."
        )
        if isinstance(value, PerReplica):
            return tuple(map(uncommitted, value.components))
        count = self.topology.num_local_replicas
        if isinstance(value, DistributedValues):
            return (value,) * count
        if not any(map(is_per_replica, jax.tree.leaves(value, is_leaf=is_per_replica))):
            return (value,)
        parts = [select_replica(index, value) for index in range(count)]
        return tuple(jax.tree.map(uncommitted, part) for part in parts)

    experimental_local_results = local_results

    @filters_traceback
    @outside_context_mesh
    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Creates a distributed value from a function. Call in cross-replica context.

        Args:
            value_fn: called once per replica of this process with a `ValueContext`; returns a
                pytree.

        Returns:
            The pytree with `PerReplica` leaves; plain with one replica.

        Raises:
            ValueError: the pytrees differ in structure.
            RuntimeError: in replica context.

        Example:
            >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> strategy.distribute_values_from_function(lambda c: 10 * c.replica_id_in_sync_group)
            PerReplica[0 | 10]

        Source: TF 2.21 distribute_lib.py, experimental_distribute_values_from_function.
        """
        stack.require_cross_replica(
            self,
            "distribute_values_from_function",
            instead="compute the value in the replica function.",
        )
        count = self.topology.num_replicas
        ids = self.topology.local_replica_ids
        values = [value_fn(ValueContext(index, count)) for index in ids]
        if count > 1:  # Equal numbers must make a PerReplica too, regardless of their values.
            values = jax.tree.map(_number_as_array, values)
        return regroup(values, self.topology)

    experimental_distribute_values_from_function = distribute_values_from_function


def _map(fn: Callable[[Any], Any], value: object) -> Any:
    return jax.tree.map(fn, value, is_leaf=reduction.is_leaf)


def _number_as_array(leaf: object) -> Any:
    is_number = isinstance(leaf, int | float | complex) and not isinstance(leaf, bool)
    return np.asarray(leaf) if is_number else leaf


class Strategy(SelfDescription, ValueMethods, LogicalDevices, OldMethods):
    """Distributes training over devices.

    A strategy is four parts. A concrete strategy only chooses them.

    Args:
        topology: the devices of the replicas.
        cross_device_ops: combine the values of replicas; None chooses the ops.
        placement: the store of each variable; None for a copy on each replica's device.
        executor: makes what runs the replica functions; called with the strategy.

    Raises:
        TypeError: an argument of another type.
        ValueError: cross-device ops that do not support these devices.

    Example:
        >>> topology = sg.MirroredStrategy(["cpu:0", "cpu:1"]).topology
        >>> strategy = sg.Strategy(topology)  # two replicas, each with a copy of every variable
        >>> with strategy.scope():
        ...     scale = sg.Variable(10.0)
        >>> strategy.run(lambda x: x * scale, args=(np.float32(2),))
        PerReplica[20.0 | 20.0]

    Source: TF 2.21 distribute_lib.py, Strategy.
    """

    # Repeats the constructor call, in any process; None if no such call made this strategy.
    recreate: Callable[[], Strategy] | None = None
    # Callbacks that each call of `fit` needs; None for no such callbacks.
    fit_callbacks: Callable[[], list[Any]] | None = None
    _is_copyable = True  # False for a strategy of processes that belong together once

    def __init__(
        self,
        topology: Topology,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        placement: Replicated | None = None,
        executor: Callable[[Any], Lockstep] = Lockstep,
    ) -> None:
        fix = "make one from devices: Topology(find_devices([...]))."
        check_type("topology", topology, Topology, "a stratagem.devices.mesh.Topology", fix)
        wanted = "an sg.CrossDeviceOps such as sg.RingAllReduce(), or None to choose"
        check_type("cross_device_ops", cross_device_ops, CrossDeviceOps | None, wanted)
        use_compilation_cache()
        self.topology = planned_topology(topology)
        self.cross_device_ops = cross_device_ops or AutomaticOps()
        # Raises if the ops do not support the devices.
        self.cross_device_ops.communicator(self.topology)
        self.placement = placement or Replicated()
        self._check_compression()
        self.variables = VariableRegistry()
        self._make_executor = executor
        self.executor = executor(self)
        self._extended = StrategyExtended(self)

    def _check_compression(self) -> None:
        """Raises a ValueError if compressed gradients are not summed whole on each replica."""
        compression, groups = self.cross_device_ops.compression, self.topology.groups
        is_elsewhere = self.placement.uses_stores or self.placement.is_remote
        if compression is None or not (groups or is_elsewhere):
            return
        kept = "over the devices of a replica" if groups else f"by {self.placement}"
        raise invalid(
            f"compression={compression} was given, and variables are placed {kept}.",
            expected="a whole copy of every variable on each replica's one device: errors of "
            "gradients are kept whole, and parts of gradients are summed elsewhere.",
            fix="leave the compression out, or shard_state, layout_map, placement and "
            "devices_per_replica.",
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.topology})"

    def __copy__(self) -> Strategy:
        raise RuntimeError(
            explain(
                f"{self} was passed to copy.copy, which cannot copy it.",
                expected="copy.deepcopy: a shallow copy would share the original's variables.",
                fix="use copy.deepcopy for a new strategy on the same devices, or itself.",
            )
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            explain(
                f"{self} was pickled, alone or with a variable of it.",
                expected="objects without a strategy: its devices and threads are this process's.",
                fix="make the strategy in the process that uses it, and send values, as from "
                "numpy.asarray(variable) or model.get_weights().",
            )
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        if not self._is_copyable:
            raise copy_refused(self)
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        devices = () if self.topology.devices is None else (*jax.devices(), *jax.devices("cpu"))
        memo.update((id(device), device) for device in devices)
        Strategy.__init__(
            copied,
            self.topology,
            self.cross_device_ops,
            placement=copy.deepcopy(self.placement, memo),
            executor=self._make_executor,
        )
        own = vars(self).keys() - vars(copied).keys()  # set by a subclass
        for name in own:
            setattr(copied, name, copy.deepcopy(vars(self)[name], memo))
        return copied

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The cluster that the strategy was created from; None in a single process."""
        return None

    @property
    def extended(self) -> StrategyExtended:
        """Additional interface for authors of libraries."""
        return self._extended

    @contextlib.contextmanager
    def scope(self) -> Generator[Strategy]:
        """Makes this strategy current and creates variables by its policy.

        Call in cross-replica context.

        Yields:
            The strategy.

        Raises:
            RuntimeError: in a replica function or in another strategy's scope, or scopes are exited
                out of order.

        Example:
            >>> with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
            ...     model = keras.Sequential([keras.layers.Dense(1)])

        Source: TF 2.21 distribute_lib.py, StrategyBase.scope.
        """
        self.executor.check_scope()
        stack.push_scope(self)
        try:
            yield self
        except Exception as error:
            explain_exhausted_memory(error, self.variables.live)
            raise
        finally:
            stack.pop_scope(self)
        if stack.current_frame() is None:
            agree_on_initial_values(self.variables, self.topology)

    @filters_traceback
    @outside_context_mesh
    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Calls a function once per replica, as one program. Call in cross-replica context.

        Arrays and Python numbers are traced; strings, bools and other objects are constants of the
        program. A second call with the same function, structure, shapes and dtypes is not retraced.

        Args:
            fn: the replica function; called in replica context.
            args: tuple or list of positional arguments, pytrees; each replica gets its component of
                a `PerReplica`, and all other values unchanged.
            kwargs: keyword arguments, likewise.
            options: hints for TPUs.

        Returns:
            The result of `fn`, each array as a `PerReplica` (plain with one replica), other objects
            unchanged.

        Raises:
            RuntimeError: in replica context, or in another strategy's scope.
            TypeError: `fn` cannot be called, or `options` is of another type.
            ValueError: `args` is not a tuple or list.

        Example:
            >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> strategy.run(lambda: sg.get_replica_context().replica_id_in_sync_group)
            PerReplica[0 | 1]

        Source: TF 2.21 distribute_lib.py, StrategyBase.run.
        """
        stack.require_cross_replica(
            self, "run", instead="call the function itself; it is in a replica."
        )
        _check_run(fn, args, options)
        _refuse_in_merge_call()
        if reported_errors:
            raise_reported()
        with _Entered(self):
            return self.executor.run(fn, args, kwargs or {})

    @filters_traceback
    @outside_context_mesh
    def run_steps(
        self,
        fn: Callable[..., Any],
        iterator: DistributedIterator,
        num_steps: int | None = None,
        *,
        reduce: ReduceOp | str | None = None,
        carry: object = None,
    ) -> Any:
        """Runs a function on the next batches, once per replica and batch, in one call of the host.

        The batches are stacked, transferred once and looped over on the devices. Call in
        cross-replica context.

        Args:
            fn: the replica function, called as in `run(fn, args=(batch,))`; or, if it takes the
                elements of a tuple instead of the tuple, as in `run(fn, args=batch)`.
            iterator: iterator of a dataset that this strategy distributed.
            num_steps: maximum number of batches; None for a `TPUStrategy`'s `steps_per_run`.
            reduce: "sum" or "mean" of each step's result over the replicas; None for no reduction.
            carry: pytree of arrays, passed to `fn` as its first argument; `fn` returns a pair of
                the next carry and its result. None for no carry.

        Returns:
            The results of `fn`, with the steps on axis 0: each array as a `PerReplica` whose
            components have shape (steps, ...); plain with `reduce`, and with one replica. With
            `carry` a pair: the last carry, as `run` would return it, and the results.

        Raises:
            StopIteration: the data has ended before the first step.
            TypeError: an argument of another type, or `fn` does not return a pair despite a carry.
            ValueError: fewer than 1 step, an iterator of another strategy, or a carry that changes
                its structure, a shape or a dtype.
            RuntimeError: in replica context, or in another strategy's scope.
            InvalidArgumentError: steps return arrays of different shapes.

        Example:
            >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> dataset = strategy.distribute_dataset([np.arange(4), np.arange(4)])
            >>> strategy.run_steps(jax.numpy.sum, iter(dataset), 2, reduce="sum")
            Array([6, 6], dtype=int32)

        Source: TF 1.x contrib tpu_strategy.py, steps_per_run.
        """
        stack.require_cross_replica(self, "run_steps", instead="call the function in a lax.scan.")
        count = datasets.checked_steps(self, fn, iterator, num_steps)
        op = None if reduce is None else ReduceOp.parse(reduce)
        if reported_errors:
            raise_reported()
        with _Entered(self):
            return self.executor.run_steps(fn, iterator, count, reduce_op=op, carry=carry)

    @filters_traceback
    @outside_context_mesh
    def distribute_dataset(
        self, dataset: object, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Splits the batches of a dataset over the replicas. Call in cross-replica context.

        Each replica takes the next ceil(B / n) examples of a batch of B until they are used
        up. Short parts are padded inside a step, and padding counts nowhere. The next batch
        is transferred to the devices while a step runs.

        Args:
            dataset: batches of the global batch size: `sg.input.Dataset`, Grain, tf.data, a torch
                `DataLoader`, Hugging Face, a Keras `PyDataset`, a generator, a list.
            options: how batches reach the devices.

        Returns:
            The dataset, to iterate once per epoch.

        Raises:
            NotImplementedError: PER_REPLICA.
            TypeError: no dataset, or options of another type.
            ValueError: arrays, which are not batched.
            RuntimeError: in replica context.

        Example:
            >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> dataset = strategy.distribute_dataset([np.arange(4), np.arange(3)])
            >>> for batch in dataset:
            ...     print(strategy.run(jax.numpy.sum, args=(batch,)))
            PerReplica[1 | 5]
            PerReplica[1 | 4]

        Source: TF 2.21 distribute_lib.py, experimental_distribute_dataset.
        """
        stack.require_cross_replica(
            self, "distribute_dataset", instead="pass a batch to run; make the dataset outside."
        )
        return datasets.from_dataset(self, dataset, options)

    experimental_distribute_dataset = distribute_dataset

    @filters_traceback
    @outside_context_mesh
    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Creates a distributed dataset of per-replica batches. Call in cross-replica context.

        Nothing is split or repeated: consecutive batches go to consecutive replicas.

        Args:
            dataset_fn: called once with an `InputContext`, or with PER_REPLICA once per replica;
                returns a dataset batched by the per-replica size.
            options: how batches reach the devices.

        Returns:
            The dataset, to iterate once per epoch.

        Raises:
            TypeError: `dataset_fn` cannot be called or returns no dataset, or options of another
                type.
            RuntimeError: in replica context.

        Example:
            >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> dataset = strategy.distribute_datasets_from_function(
            ...     lambda context: sg.input.Dataset(np.arange(5), batch_size=2)
            ... )
            >>> for batch in dataset:
            ...     print(batch)
            PerReplica[[0 1] | [2 3]]
            PerReplica[[4] | []]

        Source: TF 2.21 distribute_lib.py, distribute_datasets_from_function.
        """
        stack.require_cross_replica(
            self,
            "distribute_datasets_from_function",
            instead="pass a batch to run; make the dataset outside.",
        )
        return datasets.from_function(self, dataset_fn, options)

    experimental_distribute_datasets_from_function = distribute_datasets_from_function


class _Entered:
    """The scope of a strategy, unless this thread is in one; explains a lack of memory."""

    __slots__ = ("_frame", "_strategy")

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        is_within = stack.current_frame() is not None
        self._frame = None if is_within else stack.push(stack.FrameKind.SCOPE, strategy)

    def __enter__(self) -> None:
        if self._frame is not None:
            self._frame.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._frame is not None:
            self._frame.__exit__()
        if error is not None:
            explain_exhausted_memory(error, self._strategy.variables.live)


def _check_run(fn: object, args: object, options: object) -> None:
    """Raises a TypeError or ValueError if `Strategy.run` does not accept the arguments."""
    if callable(fn) and isinstance(args, tuple | list) and options is None:
        return
    fix = "pass the function itself and its arguments in `args`."
    check_type("fn", fn, callable, "a function", fix, owner="run")
    if not isinstance(args, tuple | list):
        raise invalid(
            f"run received args of type {type(args).__name__}.",
            expected="a tuple or list of positional arguments.",
            fix="write args=(value,) with a comma.",
        )
    check_type("options", options, RunOptions | None, "sg.RunOptions or None", owner="run")


def _refuse_in_merge_call() -> None:
    frame = stack.current_frame()
    if frame is not None and frame.replica is not None:
        raise RuntimeError(
            explain(
                "run was called in merge_call, while a step runs.",
                expected="cross-replica context outside every step.",
                fix="call the function on the replicas before or after merge_call.",
                code="SG404",
            )
        )


# The default strategy: one replica, plain variables.


@final
class DefaultStrategy(Strategy):
    """One replica on JAX's default device; variables are ordinary Keras variables.

    `sg.get_strategy()` returns it outside every scope, so that code written for a strategy runs
    without one.

    Source: TF 2.21 distribute_lib.py, _DefaultDistributionStrategy.
    """

    def __init__(self) -> None:
        super().__init__(Topology(None))


stack.set_default(DefaultStrategy)


# Executor of tasks that do not train, if one program runs as every task of a cluster.


class NonTraining(Lockstep):
    """Runs nothing: the strategy's scope and `run` raise errors in this task.

    `task` is the type and index of this process.
    """

    def __init__(self, strategy: Strategy, task: tuple[str | None, int | None]) -> None:
        super().__init__(strategy)
        self.task = task

    def check_scope(self) -> NoReturn:
        """Raises a RuntimeError."""
        task_type, index = self.task
        kind = type(self._strategy).__name__
        raise RuntimeError(
            explain(
                f"A {kind} was used in {task_type} {index}, which does not train.",
                expected="a task that trains, or sg.estimator.train_and_evaluate, which runs the "
                "right part of the program in each task.",
                fix="call sg.run_standard_server().join() in tasks that serve; in the evaluator, "
                "build the model without this strategy.",
                code="SG511",
            )
        )

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> NoReturn:
        """Raises a RuntimeError."""
        self.check_scope()

    def run_steps(self, *args: object, **kwargs: object) -> NoReturn:
        """Raises a RuntimeError."""
        self.check_scope()


# Recorded constructor calls of strategies, which another process can repeat.


_P = ParamSpec("_P")


def recreatable(init: Callable[_P, None]) -> Callable[_P, None]:
    """Decorates the `__init__` of a strategy: sets `recreate`, a function that repeats the call.

    Raises:
        TypeError: an argument name of TensorFlow; the message has the new name.
    """
    parameters = inspect.signature(init).parameters

    @functools.wraps(init)
    def recorded(*args: _P.args, **kwargs: _P.kwargs) -> None:
        strategy: Any = args[0]
        for name in OLD_ARGUMENTS.keys() & kwargs.keys() - parameters.keys():
            raise TypeError(
                explain(
                    f"{type(strategy).__name__} received {name}={kwargs[name]!r}.",
                    expected="devices.",
                    fix=f"write {OLD_ARGUMENTS[name]}.",
                )
            )
        strategy.recreate = functools.partial(type(strategy), *args[1:], **kwargs)
        init(*args, **kwargs)

    return recorded
