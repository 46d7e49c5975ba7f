"""One run from its command line to its folder: validation, identity, folder, training, record."""
