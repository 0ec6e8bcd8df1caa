"""`sg.function`: whole steps, with `run` and `reduce`, as one compiled program."""

__all__: list[str] = []
