"""Whether sampled output is distributed as the target says: chi-square tests of the rules."""
