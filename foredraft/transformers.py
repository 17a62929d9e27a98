"""Drafts inside `model.generate` of transformers: see docs/how-to/plugging-in.md."""

from foredraft.installation import needing

with needing("decoder"):
    from decoder.engines.transformers.custom_generate import Foredraft, foredraft_generate

__all__ = ["Foredraft", "foredraft_generate"]
