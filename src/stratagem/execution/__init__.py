"""Tracing, compilation and execution of replica functions; `sg.function`; row lookups."""

from stratagem.execution.analysis.row_effects import RowEffect, row_effects
from stratagem.execution.eager.replicas import run_eagerly
from stratagem.execution.embeddings.lookups import (
    embedding_lookup,
    is_recorded,
    is_table,
    is_worth_rows,
    note_table,
)
from stratagem.execution.embeddings.sharded_row_updates import rows_to_update, with_updated_rows
from stratagem.execution.executor import Executor
from stratagem.execution.functions.compiled_function import Function, function
from stratagem.execution.gradient import value_and_grad
from stratagem.execution.programs.compilations import Compilation, explain_recompiles
from stratagem.execution.programs.elastic_lockstep import ElasticLockstep, is_on
from stratagem.execution.programs.followed_program import FollowUpProgram
from stratagem.execution.programs.lockstep import Lockstep, program_of
from stratagem.execution.programs.multistep import run_steps
from stratagem.execution.programs.offloaded_program import rows_of_table
from stratagem.execution.programs.program import Program
from stratagem.execution.tracing.arguments import batch_arguments
from stratagem.execution.tracing.functionalize import ReplicaScope, current_scope, on_global_model
from stratagem.execution.tracing.remote_state import (
    BatchShare,
    Ids,
    RemoteState,
    Summand,
    SumOverWorkers,
    UpdatedValue,
    WholeInput,
)
from stratagem.execution.tracing.trace import Trace

__all__ = [
    "BatchShare",
    "Compilation",
    "ElasticLockstep",
    "Executor",
    "FollowUpProgram",
    "Function",
    "Ids",
    "Lockstep",
    "Program",
    "RemoteState",
    "ReplicaScope",
    "RowEffect",
    "SumOverWorkers",
    "Summand",
    "Trace",
    "UpdatedValue",
    "WholeInput",
    "batch_arguments",
    "current_scope",
    "embedding_lookup",
    "explain_recompiles",
    "function",
    "is_on",
    "is_recorded",
    "is_table",
    "is_worth_rows",
    "note_table",
    "on_global_model",
    "program_of",
    "row_effects",
    "rows_of_table",
    "rows_to_update",
    "run_eagerly",
    "run_steps",
    "value_and_grad",
    "with_updated_rows",
]
