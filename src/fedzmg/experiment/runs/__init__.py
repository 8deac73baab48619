"""Runs: directories, packs that train together, resuming."""
