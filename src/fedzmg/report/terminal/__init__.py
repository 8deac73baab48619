"""For a terminal: tables, cards, live displays."""
