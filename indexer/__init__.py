"""Builds an index from corpora: documents, tokens, suffix arrays and the on-disk format."""

__distribution__ = "foredraft"
