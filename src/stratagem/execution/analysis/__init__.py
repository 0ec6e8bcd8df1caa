"""Analyses of jaxprs: replication, and dependence on rows."""
