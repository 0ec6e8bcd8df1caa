"""`python -m benchmarks.compare REV`."""

from benchmarks.compare import compare

if __name__ == "__main__":
    compare()
