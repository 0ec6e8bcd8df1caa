"""Row lookups in embedding tables, their gradients, and updates of sharded tables."""
