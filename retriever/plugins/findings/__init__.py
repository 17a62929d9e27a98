"""Findings of decoders (likely next tokens), kept by tenant and model for later runs."""
