"""What directories hold, read back as plain data, and what it came to."""
