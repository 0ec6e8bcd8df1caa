"""All that plans and profiles read by pattern from the text of a compiled program (HLO).

`compiled.as_text()` is the form of a program that all compilers of XLA give. JAX's objects for it
(`runtime_executable().hlo_modules()`) have the names and operands of instructions, but shapes,
groups and attributes as text only. What the jaxpr says, too, is read there
(`planning/traced_costs.py`).

Each group of patterns names the compilers on whose text it was last seen: CPU is jaxlib 0.10.2, GPU
is jax-cuda12-pjrt 0.10.2, TPU is libtpu 0.0.42.1.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

# Structure: CPU, GPU, TPU.
_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%([\w.-]+) = (.*?) ([a-z][\w-]*)\(")
_NAME = re.compile(r"%([\w.-]+)")
_CALLED = re.compile(r"(?:calls|to_apply|body)=%([\w.-]+)")
_BRANCHES = re.compile(r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=%([\w.-]+))")
_ARRAY = re.compile(r"\b(pred|bf16|[a-z]\d+)(?:e\dm\d\w*)?\[([\d,]*)\]")
_SCOPE = re.compile(r'op_name="([^"]*)"')
_PERIOD = re.compile(r"\bsynchronized_every_(\d+)_steps\b")  # our own scope
# How often a loop runs: CPU, GPU.
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# Groups of devices that are listed: CPU, GPU, TPU.
_LISTED_GROUPS = re.compile(r"replica_groups=\{(\{[\d,{} ]*\})\}")
# Groups that are counted, as XLA writes an iota: not met in the programs tried with these.
_COUNTED_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# Groups along axes of a mesh, whose devices may have an order of their own: CPU.
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"
    r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
_AXIS_SIZE = re.compile(r"'([^']+)'=(\d+)")
_AXIS_PART = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
# What goes to other slices, through the hosts: TPU.
_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
# Contracted axes, on GPU in the backend config of a library's call: CPU, GPU. On TPU, products of
# matrices are convolutions.
_CONTRACTED = re.compile(r"lhs_contracting_dim(?:ension)?s(?:=\{|\":\[)([\d,\"]*)")
# Convolutions: CPU, GPU, TPU.
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{size=([\dx]+)")
_HOLES = re.compile(r"lhs_dilate=([\dx]+)")
# Convolutions of cuDNN, and the shape of queries by keys in its attention (batch, heads, and both
# lengths): GPU.
_CUDNN = re.compile(r'custom_call_target="__cudnn\$conv(\w+)"')
_ATTENTION = re.compile(r'"intermediate_tensor_shape":\{[^}]*?"dimensions":\[([\d,"]+)\]')
_LIBRARIES = tuple(
    f'custom_call_target="{name}' for name in ("__cudnn$conv", "__cudnn$fmha", "__cublas$")
)
_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f64": "float64"}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a program."""

    name: str
    type: str
    operation: str
    line: str

    @property
    def array_bytes(self) -> list[int]:
        """Sizes of the arrays in its result."""
        bits = {"pred": 8, "bf16": 16}
        return [
            math.prod(_sizes(shape)) * (bits.get(dtype) or int(dtype[1:])) // 8
            for dtype, shape in _ARRAY.findall(self.type)
        ]

    @property
    def num_bytes(self) -> int:
        """Size of its result."""
        return sum(self.array_bytes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of its result, or of the first array of it."""
        found = _ARRAY.search(self.type)
        return _sizes(found[2]) if found else ()

    @property
    def dtype(self) -> str:
        """Dtype of its result; float32 for integers."""
        found = _ARRAY.search(self.type)
        return _DTYPES.get(found[1], "float32") if found else "float32"

    @property
    def operands(self) -> list[str]:
        """Names of its operands."""
        return _NAME.findall(self.line.split(f" {self.operation}(", 1)[1].split(")", 1)[0])

    @property
    def mentioned(self) -> set[str]:
        """All names to the right of its own."""
        return set(_NAME.findall(self.line.split(" = ", 1)[1]))

    @property
    def called(self) -> list[str]:
        """Names of the computations that it calls, without branches."""
        return _CALLED.findall(self.line)

    @property
    def branches(self) -> list[str]:
        """Names of the computations of which a conditional takes one."""
        found = _BRANCHES.findall(self.line)
        return [name for all_, one in found for name in re.findall(r"[\w.-]+", all_ or one)]

    @property
    def trips(self) -> int:
        """Number of iterations of a loop; 1 if unknown."""
        found = _TRIPS.search(self.line)
        return int(found[1]) if found else 1

    @property
    def scope(self) -> str:
        """Name scopes of JAX in which it was traced."""
        found = _SCOPE.search(self.line)
        return found[1] if found else ""

    @property
    def transfer_between_slices(self) -> str | None:
        """Collective for which it sends data to the hosts of a TPU; None for other operations."""
        found = _BETWEEN_SLICES.search(self.line) if self.operation == "send" else None
        return found[1].lower().replace("_", "-") if found else None

    @property
    def is_product(self) -> bool:
        """True for a matrix product or convolution, also one that a library computes."""
        if self.operation == "custom-call":
            return any(library in self.line for library in _LIBRARIES)
        return self.operation in ("dot", "convolution")

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of devices that exchange data; empty for all together."""
        if listed := _LISTED_GROUPS.search(self.line):
            return tuple(map(_sizes, re.findall(r"\{([\d, ]*)\}", listed[1])))
        if counted := _COUNTED_GROUPS.search(self.line):
            return _rows(_iota(counted[3], counted[4]), int(counted[2]))
        if by_mesh := _MESH_GROUPS.search(self.line):
            return _mesh_groups(*by_mesh.groups())
        return ()


def computations_of(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """Returns the instructions of each computation of a program by name, and the entry's name."""
    found: dict[str, dict[str, Instruction]] = {}
    current: dict[str, Instruction] = {}
    entry = ""
    for line in text.splitlines():
        if begin := _COMPUTATION.match(line):
            current = found.setdefault(begin[1], {})
            entry = begin[1] if line.startswith("ENTRY") else entry
        elif one := _INSTRUCTION.match(line):
            current[one[1]] = Instruction(one[1], one[2], one[3], line)
    return found, entry


def period_of(text: str) -> int:
    """Returns how many steps there are to one that does what an instruction says.

    Example:
        >>> period_of('op_name="jit(step)/synchronized_every_50_steps/cond"'), period_of("ROOT %a")
        (50, 1)
    """
    found = _PERIOD.search(text)
    return int(found[1]) if found else 1


def _sizes(text: str, separator: str = ",") -> tuple[int, ...]:
    return tuple(int(size) for size in text.replace('"', "").split(separator) if size)


def _iota(sizes: str, axes: str | None) -> np.ndarray[Any, Any]:
    ids = np.arange(math.prod(_sizes(sizes))).reshape(_sizes(sizes))
    return ids.transpose(_sizes(axes)) if axes else ids


def _rows(ids: np.ndarray[Any, Any], width: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in ids.reshape(-1, width).tolist())


def _mesh_groups(
    mesh: str, device_sizes: str | None, device_axes: str | None, along: str
) -> tuple[tuple[int, ...], ...]:
    sizes: list[int] = []
    members: list[int] = []
    parts = {name: (int(before or 1), size) for name, before, size in _AXIS_PART.findall(along)}
    for name, whole in _AXIS_SIZE.findall(mesh):
        before, size = parts.get(name, (int(whole), "1"))
        inside = int(size or whole)
        members.append(len(sizes) + 1)
        sizes += [before, inside, int(whole) // (before * inside)]
    others = [axis for axis in range(len(sizes)) if axis not in members]
    ids = _iota(device_sizes or str(math.prod(sizes)), device_axes).reshape(sizes)
    return _rows(ids.transpose([*others, *members]), math.prod(sizes[axis] for axis in members))


def flops_of(product: Instruction, operands: Sequence[Instruction]) -> float:
    """Counts the FLOPs of a product; 0 if the text does not say its shape.

    Holes and padding of convolutions count as elements, so a gradient with stride is overestimated
    by the padding alone: its holes are left out. Unlike the count of a jaxpr, which is exact for a
    whole step, this says which operation computes a product.
    """
    line = product.line
    if len(operands) < 2:
        return 0.0
    left, right = operands[:2]
    if scores := _ATTENTION.search(line):
        # In one kernel: two products forward, five backward, half of them if it is causal.
        count = (5 if "Backward" in line else 2) * (0.5 if "CAUSAL" in line else 1.0)
        return 2.0 * count * math.prod(_sizes(scores[1])) * left.shape[-1]
    if labels := _LABELS.search(line):
        if library := _CUDNN.search(line):
            # In any direction the labels are those of the forward pass, of which each output sums
            # over the kernel's positions and input features.
            kernel, output = {
                "BackwardInput": (right, left),
                "BackwardFilter": (product, right),
            }.get(library[1], (right, product))
            sizes = zip(labels[2], kernel.shape, strict=True)
            taps = math.prod(size for axis, size in sizes if axis != "o")
            return 2.0 * math.prod(output.shape) * taps
        window, holes = _WINDOW.search(line), _HOLES.search(line)
        taps = math.prod(_sizes(window[1], "x")) if window else 1
        depth = right.shape[labels[2].index("i")]
        skipped = math.prod(_sizes(holes[1], "x")) if holes else 1
        return 2.0 * math.prod(product.shape) * taps * depth / skipped
    contracted = _CONTRACTED.search(line)
    if contracted is None:
        return 0.0
    depth = math.prod(left.shape[axis] for axis in _sizes(contracted[1]))
    return 2.0 * math.prod(product.shape) * depth
