"""Drafts inside SGLang.

Experimental: it has run with SGLang's own classes, its C++ corpus and its verification kernels on a
CPU, and never in a whole SGLang with a model, which takes a GPU.
"""
