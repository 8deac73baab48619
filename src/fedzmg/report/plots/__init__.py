"""Figures for print, the same bytes every time."""
