"""Measurements of Penstock, alone and beside others. They come with the source, not with the installed package."""
