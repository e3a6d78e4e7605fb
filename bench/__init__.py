"""Benchmarks that measure how fast the system is."""
