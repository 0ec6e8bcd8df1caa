"""The benchmarks: that they measure what they say; the figures come from `make bench`."""
