"""Drafts inside ONNX Runtime GenAI: see docs/how-to/engines.md."""

from foredraft.installation import needing

with needing("onnxruntime-genai"):
    from decoder.engines.onnxruntime_genai import DraftingLoop

__all__ = ["DraftingLoop"]
