"""Drafts for TensorRT-LLM, experimental: never run in TensorRT-LLM. See docs/how-to/engines.md."""

from decoder.engines.experimental_tensorrt_llm import DraftsForTensorRtLlm

__all__ = ["DraftsForTensorRtLlm"]
