"""Runs in processes of `penstock check`: reads samples as a worker does, and reports facts.

It judges nothing. Begin with `process.py`.
"""
