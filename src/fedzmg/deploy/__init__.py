"""Deployed federations: the rules of a simulation in real processes, over Flower.

Only ``server_app``, ``client_app``, ``flower`` and ``processes`` know Flower. The client app does
without torch: a long-lived worker on the device trains.
"""
