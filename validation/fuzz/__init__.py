"""Coverage-guided fuzzing of the parsers that read sockets: `make test-external NAME=fuzz`."""
