"""Builds on Ray: `--engine ray`."""
