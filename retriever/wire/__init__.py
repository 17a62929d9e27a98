"""Values as messages, and errors as statuses."""
