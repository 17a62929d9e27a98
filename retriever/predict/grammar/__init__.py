"""What a grammar forces: drafts that are nearly certain."""
