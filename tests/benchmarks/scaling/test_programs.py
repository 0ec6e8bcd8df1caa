"""What is read from a compiled program."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cases import Environments
from benchmarks.runner import Effort
from benchmarks.scaling.outlook import read_program
from benchmarks.scaling.programs import Reduction, reductions_in

TUPLE = """
  %all-reduce = (f32[784,256]{1,0}, bf16[10]{0}) all-reduce(%dot, %b), replica_groups={{0,1}}
  %get-tuple-element.1 = f32[784,256]{1,0} get-tuple-element(%all-reduce), index=0
"""
STARTED = """
  %ar = f32[64]{0:T(256)} all-reduce-start(f32[64]{0:T(256)} %x), channel_id=1
  %done = f32[64]{0:T(256)} all-reduce-done(f32[64]{0:T(256)} %ar)
"""
TILED = "%a = (s8[3]{0:T(4,128)}, pred[2,5]{1,0:T(8,128)(4,1)}) all-reduce-start(%x, %y), a={}"
SCALAR = "ROOT %all-reduce.2 = f64[] all-reduce(f64[] %x), to_apply=%sum"


@pytest.mark.parametrize(
    ("program", "wanted"),
    [
        (TUPLE, [(784 * 256 * 4, "f32"), (20, "bf16")]),
        (STARTED, [(256, "f32")]),
        (TILED, [(3, "s8"), (10, "pred")]),
        (SCALAR, [(8, "f64")]),
        (TUPLE + STARTED, [(784 * 256 * 4, "f32"), (20, "bf16"), (256, "f32")]),
        ("%x = f32[3]{0} add(%all-reduce, %all-reduce)", []),
    ],
)
def test_reductions_are_found(program: str, wanted: list[tuple[int, str]]) -> None:
    assert reductions_in(program) == [Reduction(*one) for one in wanted]


@pytest.mark.parametrize("name", ["all-gather", "reduce-scatter", "all-to-all"])
def test_other_collectives_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"The program has a {name}"):
        reductions_in(f"%x = f32[8]{{0}} {name}(f32[4]{{0}} %y), dimensions={{0}}")


@pytest.mark.slow
def test_step_of_the_mlp_is_what_it_is_by_hand() -> None:
    step = read_program("mlp", 16, Environments(peers=Path("nowhere")), Effort())
    sizes = [(784, 256), (256, 128), (128, 10)]
    num_weights = [rows * columns for rows, columns in sizes]
    num_parameters = sum(num_weights) + 256 + 128 + 10
    assert (step.num_parameters, step.batch_size) == (num_parameters, 16)
    assert (step.title, step.dtype) == ("MLP", "float32")
    # Each gradient once, and nothing else: metrics are summed when they are read.
    assert step.reduced_bytes == 4 * num_parameters
    # Forward, gradients of weights, gradients of all inputs but the first; and Adam.
    products = 2 * 16 * (2 * sum(num_weights) + sum(num_weights[1:]))
    assert products < step.flops < products + 25 * num_parameters
    # At least weights, gradients and both moments of Adam, read and written.
    assert step.accessed_bytes > 4 * 7 * num_parameters
