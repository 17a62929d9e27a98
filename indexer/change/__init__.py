"""Changing an existing index, rebuilding it for another tokenizer, and verifying it."""
