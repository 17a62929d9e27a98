"""Outputs and deletions shared with other services, through a Redis server."""
