"""A fork server that starts processes with JAX and Keras already loaded."""
