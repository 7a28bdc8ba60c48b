"""CSV files: tables with a header, whose columns may hold the paths of images. Begin with `format.py`."""
