"""What drafts would gain on recorded outputs: tokens per step, and time by a cost curve."""
