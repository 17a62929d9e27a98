"""Prediction by look-ups: four databases, the mixer that weighs their evidence, the predictor."""
