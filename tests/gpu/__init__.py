"""What only a GPU can tell. Run by pytest, or where there is none by `python3 -m tests.gpu`."""
