"""Analyses of jaxprs: replication, dependence on rows, retracing."""
