"""Decoders that transformers' own code runs, over Penstock's cache and kernels.

Its attention and its experts come here by transformers' registries; products, norms, gated blocks, activations and
rotation are put in place of its own. What loads transformers' models is imported only where one is run.
"""
