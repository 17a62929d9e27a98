"""The log that keeps recent outputs on disk."""
