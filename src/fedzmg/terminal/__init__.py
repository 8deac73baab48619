"""Tables, cards and live displays of the terminal, rendered by rich."""
