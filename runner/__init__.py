"""slotfile: one executable file that holds a language model and serves it."""

__version__ = "0.1.0"
