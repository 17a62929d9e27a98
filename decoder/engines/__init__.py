"""Drafts inside the engines that people run; each adapter is imported by its full path."""
