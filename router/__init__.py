"""Front doors, admission, policy, and the life of every request."""
