"""Draft trees for language models: drafters, the service that shares one, and its clients.

Importing it loads nothing: programs import `foredraft`.
"""

__distribution__ = "foredraft"
