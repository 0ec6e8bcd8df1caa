"""Memory of a compiled program, from the figures of the compiler."""

from __future__ import annotations

from stratagem.planning.memory import CompilerMemory


def test_peak_counts_results_that_take_no_arguments_place() -> None:
    memory = CompilerMemory(
        argument_bytes=100, output_bytes=60, alias_bytes=50, temp_bytes=7, code_bytes=2
    )
    assert memory.peak_bytes == 100 + 10 + 7 + 2


def test_lasting_arguments_are_not_temporary_memory() -> None:
    memory = CompilerMemory(
        argument_bytes=100,
        output_bytes=60,
        alias_bytes=50,
        temp_bytes=7,
        code_bytes=2,
        lasting_bytes=80,
    )
    assert memory.passing_bytes == 100 - 80 + 10 + 7
