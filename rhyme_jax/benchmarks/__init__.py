"""Measurements: what the fast paths gain, and that they change nothing."""
