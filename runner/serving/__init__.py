"""Drives: the decode loop, the engine process, the protocol between the processes, the timings."""
