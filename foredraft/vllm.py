"""Drafts inside vLLM: `"model": "foredraft.vllm.ForedraftProposer"`, see docs/how-to/engines.md."""

from foredraft.installation import needing

with needing("vllm"):
    from decoder.engines.vllm.proposer import ForedraftProposer

__all__ = ["ForedraftProposer"]
