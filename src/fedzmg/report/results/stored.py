"""Files of run directories, read whole."""

from fedzmg.formats import read_json, read_toml

__all__ = ["read_json", "read_toml"]
