"""Specification files of runs, grids and studies."""
