"""Ridgeline serves one language model on a Ray cluster. Its packages are the folders at the top of the repository."""
