"""Drafts inside SGLang, as a speculative algorithm of its own: see `plugin`."""
