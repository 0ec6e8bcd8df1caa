"""Moves of keyed tables to another number of servers."""
