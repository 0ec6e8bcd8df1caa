"""Contexts of a call (cross-replica, replica, update), and the current strategy."""
