"""Steps that gather each sharded weight for one use at a time."""

__all__: list[str] = []
