"""The format on disk: what a reader needs, and how files get to their place."""
