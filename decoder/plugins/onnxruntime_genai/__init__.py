"""Drafts inside ONNX Runtime GenAI."""
