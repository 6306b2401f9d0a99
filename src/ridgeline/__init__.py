"""Ridgeline serves one language model on a Ray cluster. Its packages are the folders at the top of the repository.

They are links here, so that pip installs one package, `ridgeline`, and not ten with names like `router` and `engine`.
"""
