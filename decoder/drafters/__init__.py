"""Drafters that need a model, or one another, and the loop's side of every drafter."""
