"""`ParameterServerStrategy`: its four parts in each kind of process."""
