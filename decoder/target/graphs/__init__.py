"""Passes of a few fixed shapes, each captured once and then replayed."""
