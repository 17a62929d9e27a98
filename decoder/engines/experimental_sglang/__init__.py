"""Drafts inside SGLang.

Experimental: tested with SGLang's own classes, its C++ corpus and its verification kernels on a
CPU, never in a whole SGLang with a model, which needs a GPU.
"""
