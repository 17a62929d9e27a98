"""Replication: drafters share their outputs through streams of a Redis server."""
