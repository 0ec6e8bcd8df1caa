"""Steps that gather each sharded weight for one use at a time."""
