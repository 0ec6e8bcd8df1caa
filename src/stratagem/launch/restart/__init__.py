"""Running, stopping and restarting the tasks of a launch."""
