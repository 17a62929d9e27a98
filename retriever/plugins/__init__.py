"""Optional parts of an installation: without the folder of one, all others still work."""
