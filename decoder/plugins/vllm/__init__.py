"""Drafts inside vLLM; see docs/how-to/engines.md."""
