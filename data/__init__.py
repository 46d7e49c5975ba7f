"""Tokenizers, corpora, packing and the deterministic stream.

Training and evaluation see one interface, ``data.dataset.open_dataset``. ``data.config`` holds the typed configs and
imports nothing heavy, so that a config can be checked without torch.
"""
