"""Prediction by look-ups: the databases, the mixer that weighs their evidence, the predictor."""
