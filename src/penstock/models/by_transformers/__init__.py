"""Decoders that transformers' own code runs, over Penstock's cache and kernels.

Its attention and its experts come here by transformers' registries, its products, activations and rotary tables by
modules that are put in place of its own. What loads transformers' models is imported only where one is run.
"""
