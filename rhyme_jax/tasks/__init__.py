"""Prompts and rewards: where problems come from and how answers are graded."""
