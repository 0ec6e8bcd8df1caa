"""Processes that serve objects, on this machine and on Ray: start, watch, start again."""
