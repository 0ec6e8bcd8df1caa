"""Row lookups in large tables, and updates of rows."""

__all__: list[str] = []
