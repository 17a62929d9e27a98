"""A status page of a running service, for a browser."""
