"""The command ``tensorizer``, which is separate from the library that it uses."""
