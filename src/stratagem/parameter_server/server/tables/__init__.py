"""Tables whose rows are found by 64-bit keys."""

__all__: list[str] = []
