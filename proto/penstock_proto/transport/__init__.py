"""How messages travel: their codec, ZMTP, unix sockets, and memory that is handed over.

It knows no conversation. Begin with `codec.py`.
"""
