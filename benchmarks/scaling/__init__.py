"""How much faster many workers are than one: measured on two cores, predicted for many GPUs."""
