"""Targets: what the command line's MODULE:ATTR or file name stands for, and the import of user code.

The error of an import says where it comes from in user code. Begin with `importing.py`.
"""
