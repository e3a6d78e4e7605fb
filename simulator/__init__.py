"""Drives the real control code in virtual time, with faults from a seed, and checks that it is right."""
