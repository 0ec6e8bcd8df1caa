"""Hours of training with faults: nothing may grow. `make test-external NAME=soak`."""
