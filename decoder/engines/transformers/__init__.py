"""Adapters for `model.generate` of transformers; see docs/how-to/generating.md."""
