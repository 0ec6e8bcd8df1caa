"""Groups of processes that continue without lost members."""
