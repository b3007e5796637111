"""Python file objects for files behind addresses."""
