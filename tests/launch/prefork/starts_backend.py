"""A module that does at import what none should."""

import jax

jax.devices()
