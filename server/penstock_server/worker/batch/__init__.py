"""Makes a batch: checks samples against the spec, and copies them into a slot.

It knows neither splits nor lanes. Begin with `collate.py`.
"""
