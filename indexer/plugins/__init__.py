"""Optional parts of an installation. Any of these folders may be missing."""
