"""Findings of decoders (likely next tokens), stored by tenant and model for later runs."""
