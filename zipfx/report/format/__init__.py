"""Format: named tensors and one text as a file that takes the place of another at once."""
