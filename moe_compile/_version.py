"""The version, in a file of its own: the build reads it without importing torch."""

__version__ = "0.1.0"
