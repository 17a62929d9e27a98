"""The target model, and all that lets it verify a tree in one pass."""
