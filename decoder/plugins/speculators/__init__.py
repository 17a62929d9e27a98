"""Heads: EAGLE heads and other speculators, which draft from the target model's hidden states."""
