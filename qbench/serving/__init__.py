"""Serving: the dynamic batcher, the threads around it, load on it and what it measures."""
