"""How fast Stratagem is, beside hand-written JAX and beside other frameworks: `make bench`."""
