"""Adapters for inference engines; import each by its full path, as it loads only its own engine."""
