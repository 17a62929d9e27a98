"""Drafters that run a model or combine other drafters, and the loop's interface to drafters."""
