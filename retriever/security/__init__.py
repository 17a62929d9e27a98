"""Security of a service: TLS material, credentials, and the tenant of each call."""
