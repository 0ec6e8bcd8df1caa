"""`sg.function`: whole steps, with `run` and `reduce`, as one compiled program."""
