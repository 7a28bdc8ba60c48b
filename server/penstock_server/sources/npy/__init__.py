"""NumPy's .npy and .npz files."""
