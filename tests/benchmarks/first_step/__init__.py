"""The first step: sides and caches, figures, and real processes on the smallest workload."""
