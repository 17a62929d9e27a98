"""Contenders: ways to decode prompts in a benchmark, behind one protocol, and their figures.

`registry.py` lists the contenders of this package: transformers' own generation and prompt lookup,
our own drafter as a whole and in parts, and draft models and heads alone. Published drafting rules
are in `benchmarks/papers` of a checkout, and are found there by name.
"""
