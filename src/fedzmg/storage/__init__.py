"""Files on disk: atomic writes, locks, run directories, checkpoints."""
