"""Compiled inner loops: plain arrays in, plain arrays out.

The tests compare each with a slow, obvious reference implementation on thousands of seeded cases.
All release the GIL and are cached on disk after their first compilation.
"""
