"""Reads conversations from records, given the record's shape and its turns' dialect."""
