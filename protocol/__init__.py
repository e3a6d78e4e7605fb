"""What all processes share: messages, delivery, block hashes, errors, clock, timeline. It imports no other package."""
