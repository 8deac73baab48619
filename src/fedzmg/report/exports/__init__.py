"""Files that commands leave, put together from several media."""
