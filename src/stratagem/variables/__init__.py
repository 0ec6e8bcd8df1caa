"""Distributed variables: kinds, stores, placement, layouts, shards and aggregation."""
