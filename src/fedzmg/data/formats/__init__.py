"""File formats: each module reads one layout exactly, into columns, and refuses what is not it."""
