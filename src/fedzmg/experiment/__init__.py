"""Running experiments and judging their outcome; bad input raises ``InputError``."""
