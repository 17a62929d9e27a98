"""What must never be drafted is taken out here, before it becomes tokens."""
