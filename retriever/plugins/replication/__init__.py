"""Replication of outputs and deletions between services, through a Redis server."""
