"""Drafts inside SGLang; experimental, never run in a full SGLang. See docs/how-to/engines.md.

SGLang finds `register` through an entry point in each of its processes. Start SGLang with
`--speculative-algorithm FOREDRAFT`.
"""

from foredraft.face import face_of

__all__, __getattr__, __dir__ = face_of(__name__, "experimental_sglang.pyi", "sglang")
