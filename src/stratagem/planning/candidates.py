"""Candidates of a search: meshes, sharded state, rematerialization and precision."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from stratagem.planning.schedule import Reduction
from stratagem.planning.step_time import BACKWARD_SHARE, Assumptions, message_s, operations_s
from stratagem.planning.targets import Target
from stratagem.planning.traced_costs import TracedCosts
from stratagem.variables.placement import is_worth_sharding


@dataclasses.dataclass(frozen=True)
class Form:
    """A form of computing: policies of `sg.remat` and of Keras's precision; None for the model's.

    Args:
        remat: policy of `sg.remat`.
        precision: name of a dtype policy.
    """

    remat: str | None = None
    precision: str | None = None

    def code(self, model: str) -> list[str]:
        """Returns the lines of code that set it.

        Args:
            model: name of the model's variable.
        """
        lines = [f'keras.config.set_dtype_policy("{self.precision}")'] if self.precision else []
        return [*lines, f'sg.remat({model}, "{self.remat}")'] if self.remat else lines


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanCandidate:
    """One way to train a model on a machine.

    Args:
        strategy: name of the strategy's class.
        num_replicas: number of replicas, which split the batch.
        devices_per_replica: number of devices that share a layout (the model axis).
        shard_size: number of replicas that store one copy of sharded state.
        shard_state: as in `MirroredStrategy`.
        form: rematerialization and precision.
    """

    strategy: str
    num_replicas: int
    devices_per_replica: int
    shard_size: int
    shard_state: str | None
    form: Form

    @property
    def mesh(self) -> tuple[int, int, int]:
        """Sizes of the axes: copies of the state, shards of a copy, devices of a replica."""
        return self.num_replicas // self.shard_size, self.shard_size, self.devices_per_replica

    @property
    def code(self) -> str:
        """The code that gives it; `layout_map` and `model` are the script's."""
        arguments: list[str] = []
        if self.shard_state:
            arguments.append(f'shard_state="{self.shard_state}"')
            if self.shard_size < self.num_replicas:
                arguments.append(f"shard_size={self.shard_size}")
        if self.devices_per_replica > 1:
            arguments.append(f"devices_per_replica={self.devices_per_replica}")
            arguments.append("layout_map=layout_map")
        first, rest = f"strategy = sg.{self.strategy}({', '.join(arguments)})", self.form
        before = Form(precision=rest.precision).code("model")
        return "; ".join([*before, first, *Form(rest.remat).code("model")])

    @property
    def num_settings(self) -> int:
        """Number of settings that differ from the defaults."""
        given = (self.form.remat, self.form.precision, self.shard_state)
        is_hybrid = self.shard_state is not None and self.shard_size < self.num_replicas
        return sum(map(bool, given)) + is_hybrid + (self.devices_per_replica > 1)


def list_candidates(
    target: Target,
    global_batch: int,
    forms: Sequence[Form],
    *,
    strategy: str,
    model_sizes: Sequence[int] = (1,),
) -> list[PlanCandidate]:
    """Returns all candidates whose replicas can split the batch.

    Args:
        target: the machine.
        global_batch: examples over all replicas.
        forms: that were traced.
        strategy: name of the strategy's class.
        model_sizes: numbers of devices that a layout may be divided over.
    """
    found: list[PlanCandidate] = []
    for size, form in itertools.product(model_sizes, forms):
        num_replicas = target.num_devices // size
        if target.num_devices % size or global_batch % num_replicas:
            continue
        shardings: list[tuple[str | None, int]] = [(None, 1)]
        shards = [size for size in range(2, num_replicas + 1) if num_replicas % size == 0]
        shardings += itertools.product(("optimizer", "all"), shards)
        found += [
            PlanCandidate(
                strategy=strategy,
                num_replicas=num_replicas,
                devices_per_replica=size,
                shard_size=shard_size,
                shard_state=shard_state,
                form=form,
            )
            for shard_state, shard_size in shardings
        ]
    return found


# Estimated memory and time of a candidate, by arithmetic on a traced step.
#
# Gathers of weights hide behind the products of other layers, and sums of gradients behind the
# backward pass. Sums of partial products within a replica, and weights that are gathered after an
# update, hide behind nothing. An accelerator reaches the share of its peak in `PRODUCT_SHARES`.

# Share of the peak rate that products of large decoders reach. Each is read from one published
# throughput, which docs/performance.md marks; all other rows check it. A v5p, whose
# published shares are like those of a v5e, has the same. Others have the default of `Assumptions`.
PRODUCT_SHARES: Mapping[str, float] = {"v5e": 0.77, "v5p": 0.77, "v6e": 0.52, "A100": 0.60}
# Per direction. PCI Express x16: generation 5 on H100, H200, B200; 4 on A100 and L4 (data sheets).
# TPUs: jax-ml.github.io/scaling-book, "How to think about TPUs".
HOST_BYTES_PER_S: Mapping[str, float] = {
    **dict.fromkeys(("H100", "H200", "B200"), 64e9),
    **dict.fromkeys(("A100", "L4", "v6e"), 32e9),
    **dict.fromkeys(("v4", "v5e", "v5p"), 16e9),
}
_FLOAT32_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Weight:
    """A variable of a model with its optimizer state.

    `divided` has the axes that each number of devices per replica divides.
    """

    shape: tuple[int, ...]
    num_bytes: int
    slot_bytes: int = 0
    is_trained: bool = True
    divided: Mapping[int, frozenset[int]] = dataclasses.field(
        default_factory=dict[int, frozenset[int]]
    )

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def gathered_bytes(self, compute_bytes: int) -> float:
        """Returns the bytes in messages and products, whose elements have `compute_bytes`."""
        return min(self.num_bytes, compute_bytes * self.size)


@dataclasses.dataclass(frozen=True)
class Workload:
    """Costs of a model and its batch on any mesh.

    `costs` are of `num_examples` on one device, by form and number of devices per replica.
    `block` has the weights of the largest block, which are gathered together; `num_blocks` says
    how often that happens.
    """

    weights: Sequence[Weight]
    costs: Mapping[tuple[Form, int], TracedCosts]
    num_examples: float
    global_batch: int
    block: Sequence[Weight]
    num_blocks: int
    example_bytes: float = 0.0


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Memory and time of a candidate.

    Args:
        memory_bytes: of a device.
        step_s: seconds of a step.
        mfu: products that the step needs without recomputation, as a share of the peak.
        fits: whether a device has the memory.
        limit: what a faster step needs more of.
        seconds: of each part, before overlap.
    """

    memory_bytes: float
    step_s: float
    mfu: float
    fits: bool
    limit: str
    seconds: Mapping[str, float]


def assumptions_of(target: Target, **given: float) -> Assumptions:
    """Returns the assumptions of a search: those of a plan, and the share of the accelerator.

    Args:
        target: the machine.
        given: values that replace these.

    Returns:
        The assumptions.
    """
    share = PRODUCT_SHARES.get(target.accelerator.name, Assumptions().compute_share)
    return dataclasses.replace(Assumptions(compute_share=share), **given)


def estimate(
    candidate: PlanCandidate, work: Workload, target: Target, assumed: Assumptions | None = None
) -> Estimate:
    """Returns the memory and the time of a candidate.

    Args:
        candidate: what to estimate.
        work: the model and its batch.
        target: the machine.
        assumed: assumptions; None for those of the accelerator.
    """
    kind = target.accelerator
    assumed = assumed or assumptions_of(target)
    costs = work.costs[candidate.form, candidate.devices_per_replica]
    examples = work.global_batch / candidate.num_replicas / work.num_examples
    parts = _CandidateParts(candidate, work, costs, examples)
    computing_s = examples * operations_s(costs.operations, target, assumed)
    computing_s /= candidate.devices_per_replica
    update_s = 2 * parts.updated_bytes() / (kind.memory_bytes_per_s * assumed.memory_share)
    exposed_s, sent_s, is_between = _sent(parts, target, assumed, computing_s)
    host_s = 2 * examples * costs.host_bytes / HOST_BYTES_PER_S.get(kind.name, 16e9)
    busy_s = computing_s + update_s
    step_s = max(busy_s + exposed_s, host_s)
    memory_bytes = parts.memory_bytes()
    fits = memory_bytes <= kind.pool_bytes
    links = "NVLink" if kind.platform == "gpu" else "ICI"
    collectives = f"collectives over {'the network' if is_between else links}"
    seconds = {"compute": busy_s, collectives: sent_s, "host link": host_s}
    useful = work.costs.get((Form(None, candidate.form.precision), 1), costs)
    rates = max(useful.operations, key=lambda one: one.flops, default=None)
    peak = kind.peak_flops_per_s(rates.dtype if rates else "float32")
    total = useful.flops * work.global_batch / work.num_examples
    return Estimate(
        memory_bytes=memory_bytes,
        step_s=step_s,
        mfu=total / (peak * target.num_devices * step_s) if step_s else 0.0,
        fits=fits,
        limit=max(seconds, key=lambda name: seconds[name]) if fits else "memory",
        seconds=seconds,
    )


@dataclasses.dataclass(frozen=True)
class _CandidateParts:
    """Sizes on one device."""

    candidate: PlanCandidate
    work: Workload
    costs: TracedCosts
    examples: float

    def held(self, weight: Weight, num_bytes: float, *, is_sharded: bool) -> float:
        """Returns the bytes of a variable or its slots that a device stores."""
        size, shards = self.candidate.devices_per_replica, self.candidate.shard_size
        if weight.divided.get(size):
            num_bytes /= size
        is_even = any(axis % shards == 0 for axis in weight.shape)
        return num_bytes / (
            shards if is_sharded and is_even and is_worth_sharding(weight.shape) else 1
        )

    def of_weights(self, bytes_per_element: float | None = None, *, is_sharded: bool) -> float:
        """Returns the bytes of all trained weights, or of all variables in their own dtype."""
        return sum(
            self.held(
                one,
                one.num_bytes if bytes_per_element is None else bytes_per_element * one.size,
                is_sharded=is_sharded,
            )
            for one in self.work.weights
            if one.is_trained or bytes_per_element is None
        )

    def gathered_bytes(self) -> float:
        """Returns the bytes of all weights in messages; frozen ones are needed, too."""
        return sum(
            self.held(one, one.gathered_bytes(self.compute_bytes), is_sharded=False)
            for one in self.work.weights
        )

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element in products of floating-point numbers."""
        products = [one for one in self.costs.operations if "float" in one.dtype]
        largest = max(products, key=lambda one: one.times * one.flops, default=None)
        return 2 if largest is not None and largest.dtype in ("bfloat16", "float16") else 4

    def updated_bytes(self) -> float:
        """Returns the bytes of weights and slots that a device reads and writes in an update."""
        is_sharded = self.candidate.shard_state is not None
        slots = sum(
            self.held(one, one.slot_bytes, is_sharded=is_sharded) for one in self.work.weights
        )
        return slots + 1.5 * self.of_weights(_FLOAT32_BYTES, is_sharded=is_sharded)

    def memory_bytes(self) -> float:
        """Returns the bytes of a device at the peak of a step."""
        state, size = self.candidate.shard_state, self.candidate.devices_per_replica
        slots = sum(
            self.held(one, one.slot_bytes, is_sharded=state is not None)
            for one in self.work.weights
        )
        total = slots + self.of_weights(is_sharded=state == "all")
        total += 2 * self.examples * self.work.example_bytes * self.work.num_examples
        divided = self.costs.divided_share
        kept = 1 - divided + divided / size
        activations = self.examples * kept * self.costs.activation_bytes
        gradients = self.of_weights(_FLOAT32_BYTES, is_sharded=state == "all")
        if state == "all":
            # The weights of two blocks, and the gradients of one that are not summed yet.
            block = self.work.block
            gathered = 2 * sum(one.gathered_bytes(self.compute_bytes) for one in block)
            unsummed = _FLOAT32_BYTES * sum(one.size for one in block if one.is_trained)
            return total + activations + gradients + (gathered + unsummed) / size
        # Until they are summed, in the dtype of products; the most activations are there before.
        late = (self.costs.with_gradients_bytes - self.costs.activation_bytes) / size
        return total + activations + min(gradients, late) * self.compute_bytes / _FLOAT32_BYTES


def _sent(
    parts: _CandidateParts, target: Target, assumed: Assumptions, computing_s: float
) -> tuple[float, float, bool]:
    """Returns seconds of messages that nothing hides, of all, and whether hosts exchange most."""
    candidate, work = parts.candidate, parts.work
    size, shards, copies = candidate.devices_per_replica, candidate.shard_size, candidate.mesh[0]
    inside = _CandidateMessages(target, assumed, range(0, shards * size, size))
    across = _CandidateMessages(
        target, assumed, range(0, candidate.num_replicas * size, shards * size)
    )
    within = _CandidateMessages(target, assumed, range(size))
    whole = parts.of_weights(_FLOAT32_BYTES, is_sharded=False)
    gathered = parts.gathered_bytes()
    behind_s = bare_s = 0.0
    if candidate.shard_state is None:
        behind_s += across.seconds("all-reduce", whole, work.num_blocks)
    else:
        behind_s += inside.seconds("reduce-scatter", whole, work.num_blocks)
        if copies > 1:
            behind_s += across.seconds("all-reduce", whole / shards, work.num_blocks)
    if candidate.shard_state == "optimizer":
        bare_s += inside.seconds("all-gather", whole, work.num_blocks)
    once_s = inside.seconds("all-gather", gathered, work.num_blocks)
    forward_s = once_s if candidate.shard_state == "all" else 0.0
    behind_s += forward_s
    if size > 1:
        bare_s += within.seconds(
            "all-reduce", parts.examples * parts.costs.summed_bytes, 4 * work.num_blocks
        )
    backward_s = BACKWARD_SHARE * computing_s
    waits_s = max(behind_s - backward_s, 0) + max(forward_s - (computing_s - backward_s), 0)
    # The first block waits for its weights, and the last sum for nothing else to do.
    ends_s = (behind_s + forward_s) / max(work.num_blocks, 1)
    exposed_s = bare_s + min(waits_s + ends_s, behind_s + forward_s)
    groups = [one for one in (inside, across) if one.size > 1]
    return exposed_s, bare_s + behind_s + forward_s, any(one.leaves_group for one in groups)


@dataclasses.dataclass(frozen=True)
class _CandidateMessages:
    """Messages in a group of devices."""

    target: Target
    assumed: Assumptions
    members: range

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def leaves_group(self) -> bool:
        """True if the members are on several hosts or slices."""
        return len({one // self.target.devices_per_group for one in self.members}) > 1

    def seconds(self, kind: str, num_bytes: float, count: int) -> float:
        """Returns the seconds of so many bytes in so many messages."""
        if self.size < 2 or not num_bytes:
            return 0.0
        count = max(count, 1)
        one = Reduction("search", round(num_bytes / count), (), kind, groups=(tuple(self.members),))
        return count * message_s(one, self.target, self.assumed)
