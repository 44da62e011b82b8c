"""Engines: built from a plan, read back, tested on themselves, judged on data."""
