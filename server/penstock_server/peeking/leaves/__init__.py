"""Shows the leaves of samples: numbers, histograms, pictures.

It knows no files and no feeds. Begin with `leaf_report.py`.
"""
