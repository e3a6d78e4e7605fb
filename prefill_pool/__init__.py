"""Engines that compute prompts and offer their KV under a lease."""
