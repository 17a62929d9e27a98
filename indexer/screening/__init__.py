"""Screening: removes excluded phrases and secrets from texts before they become tokens."""
