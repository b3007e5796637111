"""The command ``tensorizer``, which is no part of the library that it uses."""
