"""Workers for which the others wait: who, why, and what it costs. Does not import JAX."""
