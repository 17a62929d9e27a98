"""Drafts inside mlx-lm: see docs/how-to/engines.md."""

from foredraft.installation import needing

with needing("mlx-lm"):
    from decoder.engines.mlx_lm import DraftsForMlx

__all__ = ["DraftsForMlx"]
