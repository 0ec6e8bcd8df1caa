"""What each axis costs, each in a program of its own: `measure` answers a question."""
