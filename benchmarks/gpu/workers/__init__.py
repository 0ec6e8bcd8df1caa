"""Programs of the sides, each a process of its own."""
