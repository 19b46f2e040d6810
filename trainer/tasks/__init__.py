"""Trainers for common work; each is a subclass as a user would write it."""
