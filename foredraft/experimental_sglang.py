"""Drafts inside SGLang. Experimental; never run in a full SGLang. See docs/how-to/engines.md.

Each SGLang process finds `register` through an entry point. Start SGLang with
`--speculative-algorithm FOREDRAFT`.
"""

from foredraft.face import face_of

__all__, __getattr__, __dir__ = face_of(__name__, "experimental_sglang.pyi", "sglang")
