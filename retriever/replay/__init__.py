"""Replay of recorded outputs through a drafter, without a model, and its calibration."""
