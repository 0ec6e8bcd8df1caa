"""Coverage-guided fuzzing of the parsers that read sockets: `make fuzz FRAMES=1000000`."""
