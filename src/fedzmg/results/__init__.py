"""Results of runs, studies and grids, computed from disk or memory."""
