"""Programs that several processes of a check run."""
