"""FLOPs of the matrix products in each operation of a compiled program, by the shapes in its text.

Holes and padding of convolutions count as elements, so a gradient with stride is overestimated by
the padding alone: its holes are left out. Unlike `flops.py`, this says which operation computes a
product; that one counts whole steps exactly.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

from stratagem.planning.schedule import Instruction, Product, Schedule

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
