"""Drafters that run a model or combine other drafters, and what the loop needs of any drafter."""
