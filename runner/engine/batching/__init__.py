"""Adaptive batching of what is computed without generation: embeddings, scores."""
