"""Compiled loops of the rules, over plain arrays."""
