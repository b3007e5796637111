"""Files behind addresses, as Python file objects."""
