"""Screening: keeps listed phrases and secrets out of an index."""
