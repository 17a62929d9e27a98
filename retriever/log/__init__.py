"""The log of generations on disk, and the pools of tenants that it fills."""
