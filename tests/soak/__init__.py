"""Hours of training with a fault every two minutes: nothing may grow. `make soak HOURS=4`."""
