"""Measuring many prompts in parallel: tokens per second by how many share the passes."""
