"""`ParameterServerStrategy`: its four parts in each kind of process."""

__all__: list[str] = []
