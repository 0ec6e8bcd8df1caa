"""Optimizers that run on workers, under local updates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stratagem.keras.private.optimizers import trainable_variables
from stratagem.messages import explain
from stratagem.parameter_server.keras.update_rule import KerasUpdate
from stratagem.parameter_server.server.outer_update import OuterUpdate, outer_name
from stratagem.parameter_server.server.updates import stored_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import keras

    from stratagem.parameter_server.client.local_training import LocalTraining
    from stratagem.parameter_server.client.variable_client import VariableClient


def check_for_rounds(optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]) -> None:
    """Raises a NotImplementedError for an optimizer that workers cannot run by themselves."""
    if optimizer.use_ema:
        raise NotImplementedError(
            explain(
                f"{optimizer.name} has use_ema=True under local_updates.",
                expected="an optimizer without averages of the weights: each worker would average "
                "its own weights, and the global model would have none.",
                fix="omit use_ema, or omit local_updates.",
                code="SG609",
            )
        )
    client = variables[0].variable_client
    tables = [one.path for one in variables if one.has_rows]
    if tables and client.mode.num_needed:
        raise NotImplementedError(
            explain(
                f"The tables {tables} are trained by rows under synchronous=True and "
                "local_updates.",
                expected="asynchronous updates: rows are sent in each step, for which synchronous "
                "workers would have to wait for each other again.",
                fix="omit synchronous=True, or omit local_updates.",
                code="SG609",
            )
        )


def give_outer_rule(client: VariableClient, variables: Sequence[Any], optimizer: str) -> None:
    """Gives the servers the rule that applies changes of variables that an optimizer trains."""
    dense = [one for one in variables if not one.has_rows]
    if dense and client.mode.rounds is not None:
        client.set_rule(OuterUpdate(client.mode.rounds), dense, outer_name(optimizer))


def add_to_worker(
    optimizer: keras.optimizers.Optimizer,
    name: str,
    undecayed: Sequence[str],
    constraints: Mapping[str, Any],
    local: LocalTraining,
) -> None:
    """Makes an optimizer, called `name` on the servers, train this worker's own weights.

    `undecayed` are names of variables excluded from weight decay, and `constraints` are by name.
    Call before a step first runs, with a built optimizer that the servers have. Tables stay with
    the servers.
    """
    variables = [one for one in trainable_variables(optimizer) if not one.has_rows]
    if not variables:
        return
    client: VariableClient = variables[0].variable_client
    layout = client.placement_of(variables[0])
    assert layout is not None
    server = layout.servers[0]
    start: dict[str, np.ndarray] = {}
    if not local.has_optimizer(name):
        prefix = stored_name(name, "")
        start = {
            stored.removeprefix(prefix): np.array(value)
            for stored, value in client.scalars(server).items()
            if stored.startswith(prefix)
        }
    rule = KerasUpdate(optimizer, undecayed, start, constraints=constraints)
    local.add_optimizer(name, rule, variables, server)
