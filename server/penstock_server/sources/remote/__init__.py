"""Files in object stores and on web servers, read as if they were local.

obstore is imported in `stores.py` and nowhere else. A file is a row of blocks. A block is fetched when it is read, or
shortly before; it goes into the file cache, a folder that all workers of a host share, and is read from there. So
sequential reading streams, ranges cost what they hold, and an epoch that is not the first needs no network.

This room knows nothing about formats. Begin with `remote_file.py`.
"""
