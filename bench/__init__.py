"""Benchmarks: what tells how fast the system is."""
