"""Drafts inside `model.generate` of transformers: see docs/how-to/generating.md."""

from foredraft.face import face_of

__all__, __getattr__, __dir__ = face_of(__name__, "transformers.pyi", "decoder")
