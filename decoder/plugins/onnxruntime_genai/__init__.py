"""Drafts in ONNX Runtime GenAI."""
