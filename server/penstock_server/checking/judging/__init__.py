"""Starts the processes of `penstock check`, compares what they report, finds the culprit, and prints the findings.

It runs no user code itself. Begin with `collecting.py`.
"""
