"""Ray: the connection, the nodes of a cluster, and its actors."""
