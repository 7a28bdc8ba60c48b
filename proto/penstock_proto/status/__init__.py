"""The status that a daemon reports: its shape, its figures, how they change, and what they mean for users.

Begin with `status_shape.py`.
"""
