"""Module that starts a JAX backend at import, which a fork server must refuse."""

import jax

jax.devices()
