"""Tar files in the layout of WebDataset."""
