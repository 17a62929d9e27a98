"""Compiled inner loops: plain arrays in, plain arrays out.

The tests compare each loop with a slow, obvious reference implementation on thousands of seeded
cases. All loops release the GIL; their compiled code is cached on disk.
"""
