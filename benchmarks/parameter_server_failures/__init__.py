"""What is lost, and for how long, when processes of a cluster with parameter servers are killed."""

from benchmarks.parameter_server_failures.run import run_parameter_server_failures

__all__ = ["run_parameter_server_failures"]
