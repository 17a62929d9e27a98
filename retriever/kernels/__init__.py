"""Compiled inner loops: plain arrays in, plain arrays out.

Each has a slow and obvious twin in the tests, which it must equal on thousands of seeded cases.
All release the GIL and are cached on disk after their first compilation.
"""
