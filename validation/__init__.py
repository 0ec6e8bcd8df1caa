"""Checks with libraries of others, on clusters, for hours: `make test-external`."""
