"""How slabs arrive: over the network, or as memory of the same machine; from_hosts/, from the host that made them.

It knows no threads. Begin with `transport.py`.
"""
