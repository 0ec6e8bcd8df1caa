"""`compression="auto"`: the compression that would pay on the link between processes, and why.

Compressed sums are lossy, so that nothing is compressed unasked. The link and the time of coding
are measured when a strategy is made; `strategy.describe(model)` says what follows for the model.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from stratagem.devices.collectives.choice import Algorithm
from stratagem.devices.collectives.measurement import MeasuredChoice, measure_times
from stratagem.devices.compression import BFloat16, Compression, Int8, PowerSGD, TopK
from stratagem.devices.mesh import Topology
from stratagem.execution.communicator import SoleCommunicator
from stratagem.execution.compressed.sums import compressed_sums
from stratagem.group.current import current_group

# From the mildest to the most lossy. Float16 and Float8 send as much as BFloat16 and Int8.
FORMS: Mapping[str, Compression | None] = {
    "whole": None,
    "bfloat16": BFloat16(),
    "int8": Int8(),
    "power_sgd": PowerSGD(),
    "top_k": TopK(),
}
# A more lossy form must take at most this part of the time of a milder one.
_PART_TO_PAY = 2 / 3
_FLOAT_BYTES = 4
_LINK_SIZES_BYTES = (2**12, 2**21)
_CODED_SHAPE = (512, 512)
_NUM_ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class MeasuredLink:
    """Speed of messages between the processes of a cluster, and of coding on the slowest of them.

    `coding_s` has seconds for one element, by the name of the form.
    """

    latency_s: float
    bytes_per_s: float
    coding_s: Mapping[str, float]


def link_of(
    times_s: Mapping[int, float], num_replicas: int, coding_s: Mapping[str, float]
) -> MeasuredLink:
    """Returns the link that sums of arrays of some sizes in bytes take such times on.

    A sum takes a latency and, in a ring, sends 2 (n - 1) / n of its bytes.
    """
    small, large = min(times_s), max(times_s)
    byte_s = max((times_s[large] - times_s[small]) / (large - small), 1e-15)
    latency_s = max(times_s[small] - byte_s * small, 0.0)
    return MeasuredLink(latency_s, 2 * (num_replicas - 1) / num_replicas / byte_s, coding_s)


def seconds_of(
    name: str, shapes: Sequence[tuple[int, ...]], link: MeasuredLink, num_replicas: int
) -> float:
    """Returns the seconds in which gradients of these shapes are summed in a form.

    Each message takes the latency of a sum. Those of vectors are summed whole beside the others.
    """
    form = FORMS[name]
    coded = [] if form is None else [shape for shape in shapes if form.compresses(shape)]
    whole = [shape for shape in shapes if form is None or not form.compresses(shape)]
    size = sum(map(math.prod, whole)) * _FLOAT_BYTES
    total_s = bool(whole) * link.latency_s
    total_s += 2 * (num_replicas - 1) / num_replicas * size / link.bytes_per_s
    if form is None or not coded:
        return total_s
    num_messages = 1 if isinstance(form, TopK) else 2
    sent_s = form.sent_bytes(*coded, num_replicas=num_replicas) / link.bytes_per_s
    coding_s = sum(map(math.prod, coded)) * link.coding_s[name]
    return total_s + num_messages * link.latency_s + sent_s + coding_s


def chosen_form(times_s: Mapping[str, float]) -> str:
    """Returns the mildest form that no stronger one beats by a third of its time."""
    chosen = "whole"
    for name in FORMS:
        if times_s[name] <= _PART_TO_PAY * times_s[chosen]:
            chosen = name
    return chosen


def advice_lines(
    shapes: Sequence[tuple[int, ...]], link: MeasuredLink | None, num_replicas: int
) -> list[str]:
    """Returns the reasons and the choice, as lines of text. None is the link of one process."""
    start = 'compression="auto" compresses nothing by itself.'
    if link is None:
        return [f"{start} Nothing is measured in one process."]
    lines = [
        f"{start} Measured: {link.latency_s * 1e3:.3g} ms for a message, "
        f"{link.bytes_per_s / 1e6:.4g} MB/s."
    ]
    if not shapes:
        return [*lines, "No gradients are summed."]
    times_s = {name: seconds_of(name, shapes, link, num_replicas) for name in FORMS}
    listed = ", ".join(f"{name} {time_s * 1e3:.3g} ms" for name, time_s in times_s.items())
    lines.append(f"Sums of a step, with coding: {listed}.")
    chosen = chosen_form(times_s)
    if chosen == "whole":
        return [*lines, "It would send gradients whole: no other form saves a third of the time."]
    return [
        *lines,
        f'It would choose compression="{chosen}": from mild to lossy, each step must save a third.',
    ]


def measured_link(topology: Topology, measured: MeasuredChoice | None) -> MeasuredLink | None:
    """Returns the link between processes; all of them must call it, and receive the same.

    Args:
        topology: devices of all processes.
        measured: times of sums, if there are some already.

    Returns:
        The link, or None in one process.
    """
    group = current_group()
    if group is None or not topology.spans_processes:
        return None
    own = measure_times(topology, _LINK_SIZES_BYTES) if measured is None else measured.times_s
    reported = group.exchange("times of sums and of coding", [_fastest_sums(own), coding_times()])
    group.return_to_step(0)  # the user's program counts its steps from 1
    sums, codings = zip(*reported, strict=True)
    times_s = {int(size): max(one[size] for one in sums) for size in sums[0]}
    coding_s = {name: max(one[name] for one in codings) for name in codings[0]}
    return link_of(times_s, topology.num_replicas, coding_s)


def _fastest_sums(times_s: Mapping[Algorithm, Mapping[int, float]]) -> dict[str, float]:
    sizes = next(iter(times_s.values()))
    return {str(size): min(times[size] for times in times_s.values()) for size in sizes}


def coding_times() -> dict[str, float]:
    """Measures the seconds of coding one element in each form, on a device of this process."""
    array = jax.random.normal(jax.random.key(0), _CODED_SHAPE)
    return {
        name: _coding_s(form, array) / array.size
        for name, form in FORMS.items()
        if form is not None
    }


def _coding_s(form: Compression, array: jax.Array) -> float:
    @jax.jit
    def code(gradient: jax.Array, state: dict[str, jax.Array]) -> object:
        return compressed_sums(
            form, [gradient], [state], SoleCommunicator(), replica_id=0, step=jnp.int32(1)
        )

    shapes = form.state_shapes(array.shape)
    state = {name: jnp.ones(shape, jnp.float32) for name, shape in shapes.items()}
    jax.block_until_ready(code(array, state))  # compiles
    found: list[float] = []
    for _ in range(_NUM_ROUNDS):
        started_s = time.perf_counter()
        jax.block_until_ready(code(array, state))
        found.append(time.perf_counter() - started_s)
    return statistics.median(found)
