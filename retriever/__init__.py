"""Draft trees for language models: drafters, the service that shares one, and its clients.

Importing this package loads nothing. Programs import `foredraft` instead.
"""

__distribution__ = "foredraft"
