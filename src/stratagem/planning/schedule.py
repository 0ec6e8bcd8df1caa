"""Communication in a compiled program, and the compute that overlaps it.

XLA prints a scheduled program in execution order. A message in flight is a pair of instructions,
start and done. On TPU both are fusions, as is the instruction between them that moves data and
computes at once ("async collective fusion").
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from stratagem.observe.profiling import period_of

_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%([\w.-]+) = (.*?) ([a-z][\w-]*)\(")
_CALLED = re.compile(r"(?:calls|to_apply|body)=%([\w.-]+)")
_BRANCHES = re.compile(r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=%([\w.-]+))")
_ARRAY = re.compile(r"\b(pred|bf16|[a-z]\d+)(?:e\dm\d\w*)?\[([\d,]*)\]")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_LISTED_GROUPS = re.compile(r"replica_groups=\{(\{[\d,{} ]*\})\}")
_COUNTED_GROUPS = re.compile(
    r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"  # as XLA writes an iota
)
# Groups along axes of a mesh, or along a part of an axis.
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_AXIS_SIZE = re.compile(r"'([^']+)'=(\d+)")
_AXIS_PART = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_PRODUCTS = ("dot", "convolution")
# Products that the GPU compiler delegates to a library.
_LIBRARIES = tuple(
    f'custom_call_target="{name}' for name in ("__cudnn$conv", "__cudnn$fmha", "__cublas$")
)
# TPUs send data to other slices through their hosts.
_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
# Instructions that move no data by themselves.
_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota")
_KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of an HLO program."""

    name: str
    type: str
    operation: str
    line: str

    @property
    def array_bytes(self) -> list[int]:
        """Sizes of the arrays in its result."""
        return [
            math.prod(int(size) for size in shape.split(",") if size) * _num_bits(dtype) // 8
            for dtype, shape in _ARRAY.findall(self.type)
        ]

    @property
    def num_bytes(self) -> int:
        """Size of its result."""
        return sum(self.array_bytes)


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product or convolution, with its operands."""

    instruction: Instruction
    operands: tuple[Instruction, ...]


@dataclasses.dataclass(frozen=True)
class ScheduledOperation:
    """An operation that a device runs `times` times per step, with the products inside it."""

    name: str
    accessed_bytes: int
    products: tuple[Product, ...]
    times: float


@dataclasses.dataclass(frozen=True)
class Reduction:
    """One message between devices, and the products that overlap it.

    Args:
        name: name of the instruction.
        num_bytes: size of the whole array on one device: the one summed, scattered or gathered.
        behind: names of the products that a device computes meanwhile.
        kind: "all-reduce", "reduce-scatter", "all-gather", "all-to-all" or "collective-permute".
        groups: groups of devices that exchange data; empty for all devices together.
        times: number of times it is sent per step; on average, if not in every step.
        leaves_slice: True if each device sends it to its counterparts in the other slices.

    Example:
        >>> hidden = sg.planning.Reduction("all-reduce.1", num_bytes=3000, behind=("dot.7",))
        >>> last = sg.planning.Reduction("all-reduce.2", num_bytes=1000, behind=())
        >>> sg.planning.share_behind([hidden, last])
        0.75

    Source: specific to Stratagem.
    """

    name: str
    num_bytes: int
    behind: tuple[str, ...]
    kind: str = "all-reduce"
    groups: tuple[tuple[int, ...], ...] = ()
    times: float = 1
    leaves_slice: bool = False


class Schedule:
    """A compiled program, as returned by `compiled.as_text()`.

    Args:
        text: the program.

    `is_scheduled` is True if its order is the execution order.

    Example:
        >>> mesh = jax.sharding.Mesh(jax.devices("cpu")[:2], ("replica",))
        >>> split, whole = jax.P("replica"), jax.P()
        >>> add = jax.shard_map(
        ...     lambda x: jax.lax.psum(x, "replica"), mesh=mesh, in_specs=split, out_specs=whole)
        >>> program = jax.jit(add).lower(np.ones(8, "float32")).compile()
        >>> schedule = sg.planning.Schedule(program.as_text())
        >>> [(one.kind, one.num_bytes) for one in schedule.reductions()]
        [('all-reduce', 16)]

    Source: JAX, jax.stages.Compiled.as_text.
    """

    def __init__(self, text: str) -> None:
        self.is_scheduled = "is_scheduled=true" in text
        self._computations: dict[str, list[Instruction]] = {}
        self._entry: list[Instruction] = []
        current: list[Instruction] = []
        for line in text.splitlines():
            if begin := _COMPUTATION.match(line):
                current = self._computations.setdefault(begin[1], [])
                self._entry = current if line.startswith("ENTRY") else self._entry
            elif found := _INSTRUCTION.match(line):
                current.append(Instruction(found[1], found[2], found[3], line))

    def reductions(self) -> list[Reduction]:
        """Returns all messages in the order in which they start.

        Returns:
            The messages; those inside a loop follow the loop's own. Among branches, the one
            counts that sends the most.
        """
        return list(self._reductions(self._entry, 1))

    def _reductions(self, body: Sequence[Instruction], times: float) -> Iterable[Reduction]:
        for index, instruction in enumerate(body):
            collective = self._collective(instruction)
            if collective is not None:
                behind = self._overlapped_products(body, index)
                yield _make_reduction(instruction.name, collective, behind, times)
            for inner, trips in self._bodies(instruction):
                yield from self._reductions(inner, times * trips)
            branches, share = self._branches(instruction)
            yield from max(
                (list(self._reductions(branch, times * share)) for branch in branches),
                key=lambda found: sum(one.times * one.num_bytes for one in found),
                default=(),
            )

    def _bodies(self, instruction: Instruction) -> list[tuple[list[Instruction], int]]:
        """Returns the bodies that a loop or call runs, with the trip count where known."""
        if instruction.operation not in ("while", "call"):
            return []
        trips = _TRIPS.search(instruction.line)
        times = int(trips[1]) if trips else 1
        names = _CALLED.findall(instruction.line)
        return [(self._computations.get(name, []), times) for name in names]

    def _branches(self, instruction: Instruction) -> tuple[list[list[Instruction]], float]:
        """Returns the branches of a conditional, and the share of steps that take the larger."""
        if instruction.operation != "conditional":
            return [], 1
        found = _BRANCHES.findall(instruction.line)
        names = [name for listed, one in found for name in re.findall(r"[\w.-]+", listed or one)]
        period = period_of(instruction.line)
        return [self._computations.get(name, []) for name in names], 1 / period if period > 1 else 1

    def accessed_bytes(self) -> int:
        """Returns the bytes read and written if every operation reads its operands in full.

        Returns:
            An upper estimate: a fusion that reads a part of an array counts all of it.
        """
        return round(sum(one.times * one.accessed_bytes for one in self.operations()))

    def operations(self) -> list[ScheduledOperation]:
        """Returns the operations that a device runs in a step.

        Returns:
            The operations, without loops, calls and branches around others, and without those that
            move no data.
        """
        return list(self._operations(self._entry, 1))

    def _operations(
        self, body: Sequence[Instruction], times: float
    ) -> Iterable[ScheduledOperation]:
        by_name = {one.name: one for one in body}
        for one in body:
            inner = self._bodies(one)
            for inside, trips in inner:
                yield from self._operations(inside, times * trips)
            branches, share = self._branches(one)
            yield from max(
                (list(self._operations(branch, times * share)) for branch in branches),
                key=lambda found: sum(each.times * each.accessed_bytes for each in found),
                default=(),
            )
            if inner or branches or one.operation in _FREE or one.operation.endswith("-done"):
                continue
            operands = _operands(one, by_name)
            accessed_bytes = one.num_bytes + sum(operand.num_bytes for operand in operands)
            products = tuple(self._products(one, operands))
            yield ScheduledOperation(one.name, accessed_bytes, products, times)

    def _products(self, one: Instruction, operands: tuple[Instruction, ...]) -> Iterable[Product]:
        """Returns the products that an operation is or contains."""
        if _is_product(one):
            yield Product(one, operands)
        for name in _CALLED.findall(one.line):
            inside = self._computations.get(name, [])
            by_name = {instruction.name: instruction for instruction in inside}
            for instruction in inside:
                yield from self._products(instruction, _operands(instruction, by_name))

    def _collective(self, instruction: Instruction) -> Instruction | None:
        """Returns the collective that an instruction is or starts, or None."""
        if instruction.operation.removesuffix("-start") in _KINDS:
            return instruction
        if instruction.operation == "send" and _BETWEEN_SLICES.search(instruction.line):
            return instruction
        is_start = instruction.operation == "async-start"
        if is_start or instruction.name.startswith("async-collective-start"):
            inner = [
                one for one in self._called_instructions(instruction) if one.operation in _KINDS
            ]
            return inner[0] if inner else None
        return None

    def _overlapped_products(self, body: Sequence[Instruction], index: int) -> tuple[str, ...]:
        """Returns the products between a start and its done."""
        start = body[index]
        if start.operation in _KINDS:
            return ()
        reached, between = {start.name}, list[str]()
        for instruction in body[index + 1 :]:
            if reached & set(re.findall(r"%([\w.-]+)", instruction.line.split(" = ", 1)[1])):
                reached.add(instruction.name)
                if "-done" in instruction.name:
                    return tuple(between)
            between += [
                product.name
                for product in (instruction, *self._called_instructions(instruction))
                if _is_product(product)
            ]
        return ()  # no done instruction here: the overlap is unknown

    def _called_instructions(self, instruction: Instruction) -> list[Instruction]:
        """Returns the instructions of the computations that an instruction calls, at any depth."""
        inner = [
            one
            for name in _CALLED.findall(instruction.line)
            for one in self._computations.get(name, [])
        ]
        return inner + [deeper for one in inner for deeper in self._called_instructions(one)]


def share_behind(reductions: Sequence[Reduction]) -> float:
    """Returns the fraction of bytes sent while products are computed.

    Args:
        reductions: messages of a program.

    Returns:
        A fraction from 0 to 1; 0 if there are no messages.

    Example:
        >>> hidden = sg.planning.Reduction("all-reduce.1", num_bytes=500, behind=("dot.7",))
        >>> last = sg.planning.Reduction("all-reduce.2", num_bytes=500, behind=())
        >>> sg.planning.share_behind([hidden, last]), sg.planning.share_behind([])
        (0.5, 0.0)

    Source: specific to Stratagem.
    """
    whole = sum(one.num_bytes * one.times for one in reductions)
    hidden = sum(one.num_bytes * one.times for one in reductions if one.behind)
    return hidden / whole if whole else 0.0


def _operands(one: Instruction, by_name: Mapping[str, Instruction]) -> tuple[Instruction, ...]:
    names = one.line.split(f" {one.operation}(", 1)[1].split(")", 1)[0]
    found = (by_name.get(name) for name in re.findall(r"%([\w.-]+)", names))
    return tuple(operand for operand in found if operand is not None)


def _is_product(instruction: Instruction) -> bool:
    if instruction.operation == "custom-call":
        return any(library in instruction.line for library in _LIBRARIES)
    return instruction.operation in _PRODUCTS


def _make_reduction(
    name: str, collective: Instruction, behind: tuple[str, ...], times: float
) -> Reduction:
    if collective.operation == "send":
        transfer = _BETWEEN_SLICES.search(collective.line)
        kind = transfer[1].lower().replace("_", "-") if transfer else ""
        kind = kind if kind in _KINDS else "collective-permute"
        size = collective.array_bytes[0]
        return Reduction(name, size, behind, kind, times=times, leaves_slice=True)
    kind = collective.operation.removesuffix("-start")
    groups = _parse_groups(collective.line)
    sizes = collective.array_bytes
    if collective.operation in ("all-gather-start", "reduce-scatter-start"):
        # Their result types include the operands.
        sizes = sizes[len(sizes) // 2 :]
    num_bytes = sum(sizes)
    if kind == "collective-permute" and collective.operation.endswith("-start"):
        num_bytes = sizes[0] if sizes else 0
    if kind == "reduce-scatter":
        num_bytes *= len(groups[0]) if groups else 1
    return Reduction(name, num_bytes, behind, kind, groups, times)


def _parse_groups(line: str) -> tuple[tuple[int, ...], ...]:
    if listed := _LISTED_GROUPS.search(line):
        members = re.findall(r"\{([\d, ]*)\}", listed[1])
        return tuple(tuple(int(one) for one in group.split(",") if one) for group in members)
    if counted := _COUNTED_GROUPS.search(line):
        dims = [int(size) for size in counted[3].split(",")]
        ids = np.arange(math.prod(dims)).reshape(dims)
        if counted[4]:
            ids = ids.transpose([int(axis) for axis in counted[4].split(",")])
        rows = ids.reshape(int(counted[1]), int(counted[2])).tolist()
        return tuple(tuple(row) for row in rows)
    if by_mesh := _MESH_GROUPS.search(line):
        return _parse_mesh_groups(by_mesh[1], by_mesh[2])
    return ()


def _parse_mesh_groups(mesh: str, along: str) -> tuple[tuple[int, ...], ...]:
    sizes: list[int] = []
    members: list[int] = []
    parts = {name: (int(before or 1), size) for name, before, size in _AXIS_PART.findall(along)}
    for name, whole in _AXIS_SIZE.findall(mesh):
        before, size = parts.get(name, (int(whole), "1"))
        inside = int(size or whole)
        members.append(len(sizes) + 1)
        sizes += [before, inside, int(whole) // (before * inside)]
    others = [axis for axis in range(len(sizes)) if axis not in members]
    ids = np.arange(math.prod(sizes)).reshape(sizes).transpose([*others, *members])
    rows = ids.reshape(-1, math.prod(sizes[axis] for axis in members)).tolist()
    return tuple(tuple(row) for row in rows)


def _num_bits(dtype: str) -> int:
    return {"pred": 8, "bf16": 16}.get(dtype) or int(dtype[1:])


# FLOPs of the matrix products in each operation of a compiled program, by the shapes in its text.
#
# Holes and padding of convolutions count as elements, so a gradient with stride is overestimated by
# the padding alone: its holes are left out. Unlike `flops.py`, this says which operation computes a
# product; that one counts whole steps exactly.

_SHAPE = re.compile(r"\b(pred|bf16|f16|f32|f64|[a-z]\d+)(?:e\dm\d\w*)?\[([\d,]*)\]")
_CONTRACTED = re.compile(r"lhs_contracting_dim(?:ension)?s(?:=\{|\":\[)([\d,\"]*)")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{size=([\dx]+)")
_HOLES = re.compile(r"lhs_dilate=([\dx]+)")
_TARGET = re.compile(r'custom_call_target="__cudnn\$conv(\w+)"')
# Shape of the product of queries and keys in attention by cuDNN: batch, heads, and both lengths.
_ATTENTION = re.compile(r'"intermediate_tensor_shape":\{[^}]*?"dimensions":\[([\d,"]+)\]')
_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f64": "float64"}


@dataclasses.dataclass(frozen=True)
class OperationCost:
    """FLOPs of products and bytes of an operation that runs `times` times per step."""

    dtype: str
    flops: float
    accessed_bytes: int
    times: float = 1


def operation_costs(schedule: Schedule) -> list[OperationCost]:
    """Returns the cost of each operation of a program; products of unknown shapes count 0."""
    costs: list[OperationCost] = []
    for one in schedule.operations():
        flops = sum(map(_product_flops, one.products))
        dtype = next((_dtype(product) for product in one.products), "float32")
        costs.append(OperationCost(dtype, flops, one.accessed_bytes, one.times))
    return costs


def _shape(instruction: Instruction) -> tuple[int, ...]:
    """Returns the shape of an array, or of the first one of a tuple."""
    found = _SHAPE.search(instruction.type)
    return tuple(int(size) for size in found[2].split(",") if size) if found else ()


def _dtype(product: Product) -> str:
    found = _SHAPE.search(product.operands[0].type) if product.operands else None
    return _DTYPES.get(found[1], "float32") if found else "float32"


def _product_flops(product: Product) -> float:
    line = product.instruction.line
    if len(product.operands) < 2:
        return 0.0
    if attention := _ATTENTION.search(line):
        return _attention_flops(product, attention[1])
    if labels := _LABELS.search(line):
        if library := _TARGET.search(line):
            return _library_convolution_flops(product, library[1], labels)
        return _convolution_flops(product, labels)
    contracted = _CONTRACTED.search(line)
    if contracted is None:
        return 0.0
    axes = [int(axis) for axis in contracted[1].replace('"', "").split(",") if axis]
    left = _shape(product.operands[0])
    return 2.0 * math.prod(_shape(product.instruction)) * math.prod(left[axis] for axis in axes)


def _convolution_flops(product: Product, labels: re.Match[str]) -> float:
    """Counts a convolution of HLO: each output sums over the window and the input features."""
    window = _WINDOW.search(product.instruction.line)
    taps = math.prod(_sizes(window[1])) if window else 1
    holes = _HOLES.search(product.instruction.line)
    depth = _shape(product.operands[1])[labels[2].index("i")]
    output = math.prod(_shape(product.instruction))
    return 2.0 * output * taps * depth / (math.prod(_sizes(holes[1])) if holes else 1)


def _library_convolution_flops(product: Product, kind: str, labels: re.Match[str]) -> float:
    """Counts a convolution of cuDNN, whose labels are those of the forward pass in any direction.

    Each output of the forward pass sums over the kernel's positions and input features.
    """
    result, (first, second) = product.instruction, product.operands[:2]
    kernel, output = second, result
    if kind == "BackwardInput":
        kernel, output = second, first
    elif kind == "BackwardFilter":
        kernel, output = result, second
    sizes = zip(labels[2], _shape(kernel), strict=True)
    return 2.0 * math.prod(_shape(output)) * math.prod(size for axis, size in sizes if axis != "o")


def _attention_flops(product: Product, scores: str) -> float:
    """Counts attention in one kernel: two products forward, five backward, half if it is causal."""
    line = product.instruction.line
    num_products = 5 if "Backward" in line else 2
    share = 0.5 if "CAUSAL" in line else 1.0
    num_scores = math.prod(int(size) for size in scores.replace('"', "").split(","))
    return 2.0 * share * num_products * num_scores * _shape(product.operands[0])[-1]


def _sizes(text: str) -> Sequence[int]:
    return [int(size) for size in text.split("x")]
