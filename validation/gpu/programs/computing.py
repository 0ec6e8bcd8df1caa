"""Holds memory of the GPU and keeps it busy until it is killed."""

from __future__ import annotations

import sys

import stratagem  # noqa: F401 - as a program of a user
from validation.gpu.checks import is_on_cpu

# isort: split
import jax
import jax.numpy as jnp

size = 256 if is_on_cpu() else 8192
held = jnp.ones((size, size * (1 if is_on_cpu() else 8)))  # 2 GiB on the GPU
product = jax.jit(lambda a, n: jax.lax.fori_loop(0, n, lambda _, x: jnp.tanh(x @ a), a))
jax.block_until_ready(product(held[:, :size] / size, 1))
print("RUNNING", file=sys.stdout, flush=True)
jax.block_until_ready(product(held[:, :size] / size, 10_000_000))
