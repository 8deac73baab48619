"""Studies: algorithms over seeds, their scores and tests."""
