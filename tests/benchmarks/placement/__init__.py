"""Where variables are kept: what is counted, figures and table; real workers with a small table."""
