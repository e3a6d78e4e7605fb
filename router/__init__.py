"""The router: its front door, admission, the choice of engines, and the life of every request."""
