"""Parameter-server process: variables, update rules, synchronous updates, and the journal."""
