"""Jobs of a cluster: submitting, running, following and ending them."""
