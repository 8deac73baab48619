"""What a user writes: a run, a grid, a study."""
