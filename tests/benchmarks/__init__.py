"""The benchmarks: that they measure what they say. The figures themselves come from `make bench`."""
