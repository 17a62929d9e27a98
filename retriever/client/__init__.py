"""Clients of the service: strict, failing open (with threads or asyncio), and sharded.

What is said to which server, and what it knows of each sequence, is decided without sockets in
`planner.py` and `conversation.py`; `streams.py` carries it.
"""
