"""Access of one process to the variables on parameter servers."""

__all__: list[str] = []
