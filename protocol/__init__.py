"""What processes say to each other: messages, delivery, block hashes, errors, clock, timeline. The leaf of the tree."""
