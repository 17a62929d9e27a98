"""Drafts inside ONNX Runtime GenAI: see docs/engines.md."""

from decoder.engines.onnxruntime_genai import DraftingLoop

__all__ = ["DraftingLoop"]
