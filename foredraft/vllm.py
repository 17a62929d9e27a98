"""Drafts inside vLLM: `"model": "foredraft.vllm.ForedraftProposer"`, see docs/engines.md."""

from decoder.engines.vllm import ForedraftProposer

__all__ = ["ForedraftProposer"]
