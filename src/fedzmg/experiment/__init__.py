"""Running experiments and judging their outcome."""
