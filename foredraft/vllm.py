"""Drafts inside vLLM: `"model": "foredraft.vllm.ForedraftProposer"`, see docs/how-to/engines.md."""

from foredraft.face import face_of

__all__, __getattr__, __dir__ = face_of(__name__, "vllm.pyi", "vllm")
