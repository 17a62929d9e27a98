"""Acceptance rules: which drafted tokens are kept so that the output's distribution is exact."""
