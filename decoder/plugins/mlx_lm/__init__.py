"""Drafts inside mlx-lm."""
