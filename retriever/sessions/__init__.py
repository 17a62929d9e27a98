"""The embedded drafter and what it keeps of tenants and sequences."""
