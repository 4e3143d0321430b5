"""Measurements against peers, made in one run on one machine. Never part of the tests."""
