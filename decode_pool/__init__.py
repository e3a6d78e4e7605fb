"""Engines that take KV in, or prefill by themselves, and write tokens."""
