"""Runtimes: sessions, probes, full passes, and loading a model into the normal form."""
