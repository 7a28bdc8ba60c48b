"""How slabs arrive: over the network, as memory of the same machine, or from the host that made them.

It knows no threads. Begin with `transport.py`.
"""
