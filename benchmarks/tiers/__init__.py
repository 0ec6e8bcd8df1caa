"""Rows on disk: storage engines, and a keyed table beyond memory."""
