"""A page about a running service, for a browser."""
