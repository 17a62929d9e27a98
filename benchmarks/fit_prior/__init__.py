"""Fitting the weights that every drafter begins with, by which evidence is mixed."""
