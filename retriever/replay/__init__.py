"""Recorded outputs through a drafter, without a model; and calibration."""
