"""What stands on the page, a module for every kind of section."""
