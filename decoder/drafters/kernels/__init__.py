"""Compiled inner loops of the drafters that run in the target's process."""
