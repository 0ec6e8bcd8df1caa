"""Layers, losses, metrics, optimizers and seeds with the results of a single device."""
