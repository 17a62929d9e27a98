"""Runs builds on Ray, for `--engine ray`."""
