"""Workloads, simulator, benchmarks: what tells how fast the system is, and what shows that it is right."""
