"""Drafts inside llama-cpp-python: see docs/how-to/engines.md."""

from foredraft.installation import needing

with needing("llama-cpp"):
    from decoder.engines.llama_cpp import DrafterDraftModel, attach, measure_costs

__all__ = ["DrafterDraftModel", "attach", "measure_costs"]
