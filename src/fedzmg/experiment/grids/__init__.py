"""Grids: a search over hyper-parameters, all points side by side."""
