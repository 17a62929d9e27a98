"""Speculators: small heads that draft from the target's own states."""
