"""Examination of a machine: versions, devices, limits, settings, the cluster; each with a fix."""
