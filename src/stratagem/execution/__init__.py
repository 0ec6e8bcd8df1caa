"""How a replica function becomes a program."""

from stratagem.execution.arguments import batch_arguments
from stratagem.execution.compiled_function import Function, function
from stratagem.execution.eager import run_eagerly
from stratagem.execution.exchange import Exchange, Ids
from stratagem.execution.functionalize import ReplicaScope, current_scope
from stratagem.execution.gradient import value_and_grad
from stratagem.execution.lookups import (
    embedding_lookup,
    is_recorded,
    is_table,
    is_worth_rows,
    note_table,
)
from stratagem.execution.multistep import run_steps
from stratagem.execution.own_rows import rows_to_update, with_updated_rows
from stratagem.execution.parted_program import rows_of_kept
from stratagem.execution.program import Program
from stratagem.execution.row_effects import RowEffect, row_effects
from stratagem.execution.spmd import CompiledExecution, program_of
from stratagem.execution.trace import Trace

__all__ = [
    "CompiledExecution",
    "Exchange",
    "Function",
    "Ids",
    "Program",
    "ReplicaScope",
    "RowEffect",
    "Trace",
    "batch_arguments",
    "current_scope",
    "embedding_lookup",
    "function",
    "is_recorded",
    "is_table",
    "is_worth_rows",
    "note_table",
    "program_of",
    "row_effects",
    "rows_of_kept",
    "rows_to_update",
    "run_eagerly",
    "run_steps",
    "value_and_grad",
    "with_updated_rows",
]
