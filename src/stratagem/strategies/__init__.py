"""Distribution strategies: one file each, which chooses the four parts and checks arguments."""
