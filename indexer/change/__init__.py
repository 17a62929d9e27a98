"""Changing an index that is there, and checking that it is whole."""
