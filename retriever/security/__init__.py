"""Who is calling: TLS material, files of credentials, and the tenant that a call acts for."""
