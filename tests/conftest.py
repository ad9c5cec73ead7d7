"""Puts tests/ on the import path, so that every room's tests can use builders.py."""
