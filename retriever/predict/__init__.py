"""Prediction by look-ups: five databases, the mixer that weighs their evidence, the predictor."""
