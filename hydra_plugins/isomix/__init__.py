"""What makes Hydra know studies. Every module in here is imported at each start of every Hydra program: keep it light.

`hydra_plugins` itself must have no ``__init__.py``: it is a namespace that other packages' plugins share.
"""
