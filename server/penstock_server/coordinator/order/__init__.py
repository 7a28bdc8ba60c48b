"""The order of a stream: in which order an epoch's turns come, and where its lanes end.

It knows neither workers nor consumers. Begin with `order.py`.
"""
