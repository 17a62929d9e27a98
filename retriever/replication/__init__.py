"""Replication: drafters learn from one another's outputs through streams of a Redis server."""
