"""Compiled inner loops: plain arrays in, plain arrays out.

Each has a slow, obvious twin in the tests, and equals it on thousands of seeded cases.
All release the GIL and are cached on disk after their first compilation.
"""
