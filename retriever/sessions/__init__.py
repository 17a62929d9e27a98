"""The embedded drafter, with its sessions, indexes, settings and counters."""
