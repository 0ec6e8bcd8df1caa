"""Decisions made before any process starts: options, tasks, devices, ports, membership."""
