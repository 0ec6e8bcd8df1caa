"""Processes of a cluster with parameter servers: start, watch, and restart."""
