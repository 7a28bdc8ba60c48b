"""Keys and users: the files of keys, who may change them, and which user owns a socket.

It knows no messages.
"""
