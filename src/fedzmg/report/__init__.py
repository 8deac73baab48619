"""Pages, tables and figures of results; nothing is trained here."""
