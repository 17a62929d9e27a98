"""Corpora in, index out: documents, tokens, suffix arrays and the on-disk format."""

__distribution__ = "foredraft"
