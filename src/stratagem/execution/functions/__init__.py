"""sg.function: one compiled program around whole steps."""

__all__: list[str] = []
