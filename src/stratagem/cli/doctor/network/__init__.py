"""Measurements between the hosts of a cluster: reachability, latency, bandwidth, clocks."""
