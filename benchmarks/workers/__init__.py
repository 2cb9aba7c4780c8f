"""Scripts that run inside other engines' environments, and so import nothing of Penstock."""
