"""Compiled loops of the contenders' rules, over plain arrays."""
