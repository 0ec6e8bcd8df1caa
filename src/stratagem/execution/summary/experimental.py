"""`sg.summary.experimental`: the default step, under TensorFlow's names."""

from stratagem.execution.summary.collector import get_step, set_step

__all__ = ["get_step", "set_step"]
