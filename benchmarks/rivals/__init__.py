"""Benchmarks that other systems publish."""
