"""Adapters for `model.generate` of transformers; see docs/plugging-in.md."""
