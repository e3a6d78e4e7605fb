"""What host_staged alone uses: a channel in shared memory between the two ends, and the doorbell that wakes them."""
