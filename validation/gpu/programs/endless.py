"""Runs a step whose kernel never ends; SIGUSR1 prints the stacks."""

from __future__ import annotations

import faulthandler
import signal

import stratagem as sg
from validation.gpu.checks import device

# isort: split
import jax
import jax.numpy as jnp

faulthandler.register(signal.SIGUSR1)
strategy = sg.MirroredStrategy([device()])
step = sg.function(
    lambda x: strategy.run(
        lambda one: jax.lax.while_loop(lambda y: (y >= 0).all(), lambda y: y * 0.5 + 1, one),
        args=(x,),
    )
)
jax.block_until_ready(step(-jnp.ones(8)))  # compiled, and done at once
print("RUNNING", flush=True)
print(step(jnp.ones(8)))
