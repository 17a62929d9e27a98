"""Conversion of values to messages and of errors to statuses, both ways."""
