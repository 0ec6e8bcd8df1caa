"""Client of one process for the variables on parameter servers."""

__all__: list[str] = []
