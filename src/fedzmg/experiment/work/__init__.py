"""One process at work in a directory: locks, interrupts, budgets, progress."""
