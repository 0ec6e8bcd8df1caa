"""How much faster two workers are than one, on two cores."""
