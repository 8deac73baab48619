"""Files on disk: atomic writes, logs, checkpoints and locks; damage raises ``InputError``."""
