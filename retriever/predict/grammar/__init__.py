"""Drafts of text that a grammar forces; such drafts are nearly certain."""
