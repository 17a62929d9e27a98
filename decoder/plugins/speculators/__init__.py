"""Heads: EAGLE's and other speculators that draft from a model's own states."""
