"""Measurements: figures of this machine, for side-by-side comparison and never as a test."""
