"""Draft trees for language models: the value, the protocol, the errors and the client.

Importing this package loads numpy and gRPC only, so that an inference server which needs the
client does not pay for the rest.
"""
