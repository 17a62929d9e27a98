"""Decoding with drafts: the target model, verification and the loop."""
