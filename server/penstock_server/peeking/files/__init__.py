"""Describes data files, one module for each format, and proposes how to serve them.

Begin with `data_files.py`.
"""
