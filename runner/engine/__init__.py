"""Decides. Pure: no llama_cpp, no asyncio, no threads, no clock, no randomness, no I/O. Time comes in as `now`."""
