"""Computes. The only package that imports ctypes or llama_cpp."""
