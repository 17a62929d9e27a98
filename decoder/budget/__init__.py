"""Decides how many draft nodes to verify, from measured costs and calibrated probabilities."""
