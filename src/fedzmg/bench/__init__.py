"""How fast a federation trains here, and how far that is from what the machine could do."""
