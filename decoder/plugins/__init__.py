"""Optional parts of an installation: delete a folder and the rest still works."""
