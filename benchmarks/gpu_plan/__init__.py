"""Planned memory and step time of one GPU, beside the measured, and programs of eight."""
