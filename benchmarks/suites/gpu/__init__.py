"""One NVIDIA GPU: what is run (`plan`), what it must come to (`suite`), and the work, section by section."""
