"""Whether this machine trains again to the same bits."""
