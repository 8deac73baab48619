"""Engines, which run local training in a loop, or mapped over clients and trials."""
