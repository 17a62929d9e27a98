"""Changes, verifies and rebuilds an existing index, for instance for another tokenizer."""
