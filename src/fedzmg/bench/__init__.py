"""Benchmarks: training speed on this machine compared with its peak speed."""
