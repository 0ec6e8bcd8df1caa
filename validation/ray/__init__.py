"""Programs inside Ray Train, Ray Tune and Ray jobs, by `make test-external NAME=ray`."""
