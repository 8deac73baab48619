"""Figures and tables made from finished runs."""
