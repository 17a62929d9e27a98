"""Optional parts of an installation: the rest works without the folder of any of them."""
