"""Drafts in mlx-lm."""
