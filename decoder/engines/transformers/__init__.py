"""Adapters for transformers' `model.generate`; see docs/how-to/generating.md."""
