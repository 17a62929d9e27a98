"""Drafts in vLLM; see docs/how-to/engines.md."""
