"""What drives the real control code in virtual time, with faults from a seed, and shows that it is right."""
