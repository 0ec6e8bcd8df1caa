"""Parameter servers: processes that store variables, and everything that trains with them."""
