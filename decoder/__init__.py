"""Decoding with drafts: the target model, verification and the loop."""

__distribution__ = "foredraft"
