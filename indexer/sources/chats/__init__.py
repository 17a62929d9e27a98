"""Chats: conversations in records, by the shape of the record and the dialect of its turns."""
