"""Delivery: to whom a finished batch goes, for one job or several, for ranks and for a group.

It knows no workers. Begin with `delivery.py`.
"""
