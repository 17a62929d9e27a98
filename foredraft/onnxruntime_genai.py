"""Drafts inside ONNX Runtime GenAI: see docs/how-to/engines.md."""

from foredraft.face import face_of

__all__, __getattr__, __dir__ = face_of(__name__, "onnxruntime_genai.pyi", "onnxruntime-genai")
