"""A device that waits for input, fed by the input service, tf.data service and Ray Data."""

from benchmarks.input_service.run import run_input_service

__all__ = ["run_input_service"]
