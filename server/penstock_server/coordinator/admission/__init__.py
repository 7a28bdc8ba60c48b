"""Admission: who may read which stream; how groups and ranks come together.

Begin with `admission.py`.
"""
