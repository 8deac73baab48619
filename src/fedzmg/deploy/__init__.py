"""Deployed federations: the rules of a simulation in real processes, over Flower.

Only :mod:`fedzmg.deploy.server_app`, :mod:`fedzmg.deploy.client_app` and
:mod:`fedzmg.deploy.flower` know Flower. The client app does without torch: a long-lived worker on
the device trains.
"""
