"""MATLAB files (.mat): arrays whose first or last dimension counts the samples."""
