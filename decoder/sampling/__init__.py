"""Rules that accept or reject drafted tokens, so that the output's distribution is exact."""
