"""Screening: excludes listed phrases and secrets from an index."""
