"""Findings of `penstock check`, and those about this machine and about a connection to a daemon.

Begin with `findings.py`.
"""
