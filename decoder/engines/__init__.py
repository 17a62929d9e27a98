"""Adapters for inference engines; each is imported by its full path and loads only its engine."""
