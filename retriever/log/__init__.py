"""The log of generations on disk, and the pools of tenants that are loaded from it."""
