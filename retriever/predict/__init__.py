"""The drafter as a language model made of look-ups: four databases, the mixer, the predictor."""
