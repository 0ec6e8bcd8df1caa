"""`ReplicaStep`: how a step is computed from the arrays of its pools, by each replica.

Steps whose variables are stored in shards, or on other devices, are `ShardedStep` and
`OffloadedStep`. A `Program` calls any of them.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import PartitionSpec, Sharding

from stratagem import environment
from stratagem.devices.mesh import Topology
from stratagem.devices.shared_sums import no_sums
from stratagem.errors import invalid
from stratagem.execution.jaxprs import contains_primitive, without_unused
from stratagem.execution.programs.convolutions import fast_on_cpu
from stratagem.execution.summary.collector import is_tracing
from stratagem.execution.tracing.functionalize import Trace
from stratagem.execution.tracing.remote_state import Ids, inputs_of
from stratagem.observe.process_writer import current_events
from stratagem.variables.layouts import is_remote, store_of, stored_sharding
from stratagem.variables.registry import home_of, is_on_read

if TYPE_CHECKING:
    import keras
    from jax.extend.core import Jaxpr

    from stratagem.execution.tracing.arguments import Arguments, Shaped

# Groups of a program's inputs, in order.
POOLS: Sequence[str] = ("written", "read_only", "split", "shared", "constant", "rows")

# Where the values of a step's variables come from, and where new ones go.


class Destination:
    """Destination of a variable's new value after a step."""

    __slots__ = ("_has_devices", "_is_stored", "spec", "variable")

    def __init__(self, variable: keras.Variable, topology: Topology) -> None:
        home = home_of(variable)
        self.variable: Any = variable  # of a strategy, or a plain Keras variable
        self._is_stored = home is not None
        self._has_devices = topology.devices is not None
        is_split = is_on_read(variable)
        self.spec = PartitionSpec(topology.replica_axis) if is_split else PartitionSpec()

    @property
    def is_on_devices(self) -> bool:
        """True if the value stays on the replicas' devices between steps."""
        store = store_of(self.variable)
        return store is None or (store.is_on_replicas and not store.is_pinned)

    def store(self, value: object) -> None:
        """Stores the value, with or without a strategy."""
        if self._is_stored:
            self.variable.storage = value
        else:
            # A variable without a strategy remains an array that is not committed to a device.
            self.variable.assign(jax.device_get(value) if self._has_devices else value)


class VariableValues:
    """The values that a step reads, or replaces.

    A step may have thousands of variables. Those with a copy on each device are therefore read and
    set without a call for each.
    """

    def __init__(self, variables: Sequence[Any], topology: Topology) -> None:
        self._variables = variables
        self.places = [Destination(variable, topology) for variable in variables]
        self._are_copies = all(map(_has_copies, variables))

    def read(self, value_of: Callable[[Any], Any]) -> list[Any]:
        """Returns the inputs of a step; `value_of` returns that for a variable without copies."""
        if self._are_copies:
            return [variable.stored for variable in self._variables]
        return [*map(value_of, self._variables)]

    def replace(self, values: Sequence[Any]) -> None:
        """Stores the outputs of a step."""
        if self._are_copies:
            for variable, value in zip(self._variables, values, strict=True):
                variable.stored = value
            return
        for place, value in zip(self.places, values, strict=True):
            place.store(value)


def _has_copies(variable: Any) -> bool:
    """Returns True if `stored` is what steps read and replace."""
    is_elsewhere = home_of(variable) is None or store_of(variable) is not None
    return not is_elsewhere and not is_remote(variable)


def value_for_step(variable: Any) -> Any:
    """Returns a variable's value as input of a step, with or without a strategy."""
    return variable.value if home_of(variable) is None else variable.for_step


# Functions of a step, and the shapes of their arguments, for planning.


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """One jitted function of a step. Shapes are `jax.ShapeDtypeStruct`s with shardings."""

    name: str
    function: Any
    shapes: tuple[Any, ...]  # of its arguments
    lasting: Sequence[jax.ShapeDtypeStruct]  # arguments in device memory between steps
    is_of_replicas: bool = True  # True on the replicas' devices, False on the store's
    brought: Sequence[jax.ShapeDtypeStruct] = ()  # arguments copied from pinned host memory
    put_back: Sequence[jax.ShapeDtypeStruct] = ()  # results copied to pinned host memory


def shape_on(
    value: Shaped, sharding: jax.sharding.Sharding, before: tuple[int, ...] = ()
) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of an array with a sharding, after the leading axes in `before`."""
    return jax.ShapeDtypeStruct((*before, *value.shape), value.dtype, sharding=sharding)


def spec_of_input(source: str, index: int, trace: Trace, topology: Topology) -> PartitionSpec:
    """Returns the partition spec of an input of a step."""
    variable = trace.variable(source, index)
    is_split = source in ("split", "rows") if variable is None else is_on_read(variable)
    return PartitionSpec(topology.replica_axis) if is_split else PartitionSpec()


# Compiler options of a program, and if it unrolls its loop over steps.

# XLA:GPU since 0.11 copies a step's slice of an input, such as the labels, on a second stream. An
# asynchronous operation has the whole loop reordered for overlap, without regard for memory or
# caches: all gradients of weights, then all updates. ResNet-50 then takes 2.3 GB more.
_COPIES_OF_SLICES = "dynamic-slice-copy-fusion-async-wrapper"


def loop_options(topology: Topology) -> dict[str, str] | None:
    """Returns the options for a loop over steps on these devices; None for XLA's defaults.

    JAX accepts none for a program that is called within another one.
    """
    if topology.platform != "gpu" or is_tracing():
        return None
    # An option replaces the value of XLA_FLAGS.
    return {
        "xla_disable_hlo_passes": ",".join([*environment.disabled_xla_passes(), _COPIES_OF_SLICES])
    }


def sequence_options(trace: Trace, topology: Topology) -> dict[str, str] | None:
    """Returns the options for sequences in parts on TPUs; None without.

    The compiler would pass keys and values on in a ring while it computes with each part. It then
    keeps the scores of all parts, which takes three times the memory. So it has to gather them.
    """
    if not trace.splits_sequences or topology.platform != "tpu":
        return None
    return {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}


def unrolls_steps(jaxpr: Jaxpr, topology: Topology) -> bool:
    """Returns True if the loop over steps is unrolled.

    XLA:CPU computes gradients of convolutions 30 times slower in a loop body.
    """
    devices = topology.devices or jax.local_devices()
    return devices[0].platform == "cpu" and contains_primitive(jaxpr, "conv_general_dilated")


# JAX's own limit lets this many calls wait on a device, each of which holds its input.
_MOST_CALLS_OF_JAX = 32
_MOST_BYTES = 1 << 30


def is_large(size_bytes: int) -> bool:
    """Returns True if JAX's own limit lets too much input of this size wait on a device."""
    return size_bytes * _MOST_CALLS_OF_JAX > _MOST_BYTES


def input_bytes(arrays: Sequence[Any]) -> int:
    """Returns the size of arrays or of values in a trace; other values count as nothing."""
    return sum(array.size * array.dtype.itemsize for array in arrays if hasattr(array, "dtype"))


# One call runs and one waits, however large they are, so that the devices are never idle.
_LEAST_CALLS = 2


class QueuedInput:
    """Waits for earlier calls of a program while too much of their input is on a device."""

    def __init__(self) -> None:
        self._calls: collections.deque[tuple[Any, int]] = collections.deque()
        self._total_bytes = 0

    def add(self, output: Any, size_bytes: int) -> None:
        """Counts a call that has just started, by an output that no later program donates."""
        self._calls.append((output, size_bytes))
        self._total_bytes += size_bytes
        while self._total_bytes > _MOST_BYTES and len(self._calls) > _LEAST_CALLS:
            first, first_bytes = self._calls.popleft()
            self._total_bytes -= first_bytes
            first.block_until_ready()


class ReplicaStep:
    """A step that each replica computes on its own device, up to collectives.

    With `ordered`, of `shared_sums.in_order`, each sum waits for the one before, also from step to
    step: a last written value is the order.
    """

    may_loop = True  # True if steps may loop on the devices
    num_handed = 0  # number of trailing outputs for updates that follow the step

    def __init__(
        self,
        trace: Trace,
        topology: Topology,
        *,
        ordered: ClosedJaxpr | None = None,
        is_staged: bool = False,
    ) -> None:
        self.whole = trace  # with what the step sends before its program runs
        if is_staged and trace.stages:
            trace = trace.after_sending(trace.stages[-1])
        self.trace = trace
        self.topology = topology
        self.is_ordered = ordered is not None
        self._ordered = ordered
        self.written = VariableValues(trace.written, topology)
        self.read_only = VariableValues(trace.read_only, topology)

    def value(self, variable: object) -> Any:
        """Returns a variable's value as an input of the step."""
        return value_for_step(variable)

    def sharding(self, variable: object) -> Sharding:
        """Returns the sharding of a variable as an input or output of the step."""
        return stored_sharding(variable, self.topology)

    def shape(self, variable: object) -> jax.ShapeDtypeStruct:
        """Returns the shape and sharding of a variable as an input of the step."""
        return shape_on(self.value(variable), self.sharding(variable))

    def row_shapes(self, split: Sharding) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of looked-up rows that come from outside the program."""
        count = self.topology.num_replicas
        several = (count,) if count > 1 else ()
        return [shape_on(one, split, several) for one in inputs_of(self.trace.lookups)]

    def finish(self, handed: list[Any], shared: list[Any]) -> None:
        """Uses the last `num_handed` outputs, equal on all replicas; does nothing here."""

    def compiled(self, *, many: bool) -> Any:
        """Returns the jitted function of one list of arrays per entry of `POOLS`.

        It returns written values, results, a token, and the arrays for updates. With `many`, split
        arrays have steps on axis 0, and so have results.
        """
        return jax.jit(
            self.mapped(many=many),
            donate_argnums=0,
            out_shardings=self.out_shardings(),
            compiler_options=sequence_options(self.trace, self.topology)
            or (loop_options(self.topology) if many else None),
        )

    def mapped(self, *, many: bool) -> Callable[..., Any]:
        """Returns the function of the arrays of all replicas."""
        function: Callable[..., Any] = self.many_steps if many else self.one_step
        if self._ordered is not None:
            function = _with_order(function)
        if self.topology.num_replicas == 1:
            return function
        copied, stacked = PartitionSpec(), PartitionSpec(self.topology.replica_axis)
        steps = PartitionSpec(None, self.topology.replica_axis)
        written = [place.spec for place in self.written.places]
        return jax.shard_map(
            function,
            mesh=self.topology.mesh,
            in_specs=(
                written,
                [place.spec for place in self.read_only.places],
                steps if many else stacked,
                copied,
                copied,
                stacked,
            ),
            out_specs=(written, stacked, copied, copied),
            axis_names={*self.topology.replica_axes},
            check_vma=False,
        )

    def out_shardings(self) -> Any:
        """Returns output shardings; None with one device per replica, where JAX infers them."""
        if self.topology.groups is None:
            return None
        copied = self.topology.replicated
        stacked = self.topology.stacked if self.topology.num_replicas > 1 else copied
        return [*map(self.sharding, self.trace.written)], stacked, copied, copied

    def one_step(self, *arrays: list[Any]) -> tuple[list[Any], list[Any], Any, list[Any]]:
        """Runs one step on the arrays of a replica."""
        pools = dict(zip(POOLS, arrays, strict=True))
        written = pools["written"]
        inputs = [pools[source][index] for source, index in self.trace.inputs]
        outputs = self._evaluated(inputs, written)
        values, results = outputs[: len(written)], outputs[len(written) :]
        end = len(results) - self.num_handed
        return list(values), list(results[:end]), self.token(pools), list(results[end:])

    def _evaluated(self, inputs: list[Any], written: list[Any]) -> list[Any]:
        """Returns new values for all that is written, then the other outputs of a step."""
        if self._ordered is None:
            return jaxpr_as_fun(fast_on_cpu(self.trace.jaxpr, self.topology))(*inputs)
        count = len(written) - 1
        ordered = fast_on_cpu(self._ordered, self.topology)
        *outputs, order = jaxpr_as_fun(ordered)(*inputs, written[count])
        return [*outputs[:count], order, *outputs[count:]]

    def token(self, pools: Mapping[str, Sequence[Any]]) -> Any:
        """Returns an output that is never donated, if the end of the call is awaited."""
        is_awaited = self.topology.spans_processes or current_events() is not None
        is_awaited = is_awaited or is_large(input_bytes([*pools["split"], *pools["shared"]]))
        return jnp.zeros((), bool) if is_awaited else ()

    def many_steps(
        self, written: list[Any], read_only: list[Any], split: list[Any], *others: list[Any]
    ) -> tuple[list[Any], list[Any], Any, list[Any]]:
        """Runs the steps on axis 0 of the split arrays."""

        def step(carry: list[Any], parts: list[Any]) -> tuple[list[Any], Any]:
            carry, results, _, _ = self.one_step(carry, read_only, parts, *others)
            return carry, results

        is_unrolled = unrolls_steps(self.trace.jaxpr.jaxpr, self.topology)
        written, results = jax.lax.scan(step, written, split, unroll=is_unrolled)
        if self.topology.num_replicas > 1:  # the replica axis first, as in every PerReplica
            results = [jnp.swapaxes(result, 0, 1) for result in results]
        return written, results, self.token({"split": split, "shared": others[0]}), []

    def with_shapes(self, arguments: Arguments, num_steps: int = 1) -> tuple[Any, tuple[Any, ...]]:
        """Returns the jitted function and its arguments as shapes with shardings."""
        topology, trace = self.topology, self.trace
        many = num_steps > 1
        copied, split = topology.replicated, topology.stacked_steps if many else topology.stacked
        steps = (num_steps,) if many else ()
        if topology.num_replicas == 1:
            split = copied
        leaves = [leaf for leaf in arguments.leaves if leaf.shape is not None]
        return self.compiled(many=many), (
            [*map(self.shape, trace.written)],
            [*map(self.shape, trace.read_only)],
            [shape_on(leaf, split, steps) for leaf in leaves if leaf.split],
            [shape_on(leaf, copied) for leaf in leaves if not leaf.split],
            [shape_on(jnp.asarray(constant), copied) for constant in trace.constants],
            self.row_shapes(split),
        )

    def programs(self, arguments: Arguments, name: str) -> list[StepProgram]:
        """Returns all programs of one step in execution order, built from shapes alone.

        `name` is the step's, for messages.
        """
        del name
        function, shapes = self.with_shapes(arguments)
        places = zip(
            [*self.written.places, *self.read_only.places], [*shapes[0], *shapes[1]], strict=True
        )
        lasting = [shape for place, shape in places if place.is_on_devices]
        lasting += [shape for pool in shapes[2:-1] for shape in pool]  # all but looked-up rows
        return [StepProgram("replicas", function, shapes, lasting)]


def _with_order(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of a step whose last written value is the order of its sums."""

    def run(written: list[Any], *others: list[Any]) -> Any:
        values, *outputs = function([*written, no_sums()], *others)
        return values[:-1], *outputs

    return run


# What a step sends before it ends: ids of its lookups, and early gradients.


class EarlyProgram:
    """Computes some of what a step sends, by their places, without the effects of the step."""

    def __init__(self, trace: Trace, topology: Topology, places: Sequence[int]) -> None:
        jaxpr = trace.jaxpr.jaxpr
        first = len(trace.written) + trace.num_outputs
        reduced, stays = without_unused(
            jaxpr.replace(outvars=[jaxpr.outvars[first + place] for place in places]),
            [False] * len(jaxpr.invars),
            keeps_effects=False,  # the step itself has the effects
        )
        self._inputs = [one for one, stay in zip(trace.inputs, stays, strict=True) if stay]
        run: Any = jaxpr_as_fun(ClosedJaxpr(reduced, trace.jaxpr.consts))
        if topology.num_replicas > 1:
            run = jax.shard_map(
                run,
                mesh=topology.mesh,
                in_specs=tuple(
                    spec_of_input(source, index, trace, topology) for source, index in self._inputs
                ),
                out_specs=PartitionSpec(topology.replica_axis),
                axis_names={*topology.replica_axes},
                check_vma=False,
            )
        self._run = jax.jit(run)

    def run(self, pools: Mapping[str, Sequence[Any]]) -> list[Any]:
        """Returns the values; in `pools`, a variable is a function that returns its value."""
        inputs = [pools[source][index] for source, index in self._inputs]
        return self._run(*[one() if callable(one) else one for one in inputs])


class IdsProgram(EarlyProgram):
    """Computes the ids of each lookup of a step; raises ValueError if they depend on other rows."""

    def __init__(self, trace: Trace, topology: Topology, name: str) -> None:
        # Tracing may have discarded a lookup, whose rows are then unused.
        places = {
            what.lookup: place for place, what in enumerate(trace.sent) if isinstance(what, Ids)
        }
        self._lookups = sorted(places)
        super().__init__(trace, topology, [places[lookup] for lookup in self._lookups])
        if any(source == "rows" for source, _ in self._inputs):
            raise invalid(
                f"{name} looks up rows with ids that it computes from other looked-up rows.",
                expected="ids that depend only on the arguments and variables of the step.",
                fix="look up the second rows in a separate step that receives the ids.",
            )
        self._num_lookups = len(trace.lookups)

    def run(self, pools: Mapping[str, Sequence[Any]]) -> list[Any]:
        """Returns the ids of each lookup; None if its rows are unused, or if it has none."""
        return self._by_lookup(super().run(pools))

    def program(self, pools: dict[str, list[Any]]) -> tuple[StepProgram, list[Any]]:
        """Returns the program with arguments and the shapes of the ids, given shapes in `pools`."""
        inputs = tuple(pools[source][index] for source, index in self._inputs)
        program = StepProgram("ids", self._run, inputs, inputs)
        return program, self._by_lookup(jax.eval_shape(self._run, *inputs))

    def _by_lookup(self, computed: Sequence[Any]) -> list[Any]:
        ids: list[Any] = [None] * self._num_lookups
        for lookup, value in zip(self._lookups, computed, strict=True):
            ids[lookup] = value
        return ids
