"""What must not get into an index: listed phrases and secrets."""
