"""Processes that train together: membership, verdict, secret, survivors, messages."""
