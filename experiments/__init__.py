"""Experiments: one file a question, with what is expected and why, its figures and its claims."""
