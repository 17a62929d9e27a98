"""Clients of the service: strict, failing open (with threads or asyncio), and sharded.

`planner.py` and `conversation.py` use no sockets. They decide which message goes to which server,
and track what each server knows of a sequence. `streams.py` sends the messages.
"""
