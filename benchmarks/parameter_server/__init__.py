"""How fast parameter servers are, beside TensorFlow's: steps, rows of tables, closures."""

from benchmarks.parameter_server.run import run_parameter_server

__all__ = ["run_parameter_server"]
