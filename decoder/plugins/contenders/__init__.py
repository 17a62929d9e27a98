"""What decodes prompts in a benchmark, behind one protocol, and the figures of it.

`registry.py` lists the contenders of this package: transformers' own ways, our own drafter whole
and in parts, draft models and heads alone. Published drafting rules are in `benchmarks/papers` of a
checkout, where they are found by name.
"""
