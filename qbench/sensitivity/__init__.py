"""Sensitivity: suffix replay, and the cells of a sweep."""
