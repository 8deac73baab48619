"""HOW one round of local training runs: in a loop, or mapped over clients and trials."""
