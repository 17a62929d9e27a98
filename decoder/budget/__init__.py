"""How much of a draft is worth verifying on the machine at hand."""
