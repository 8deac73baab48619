"""FedZMG for training loops of your own: an optimizer, a function, a wrapper.

* :class:`ZeroMeanSGD`: FedZMG's client step as a ``torch.optim.Optimizer``.
* :func:`zero_mean_`: centre a model's gradients before any other optimizer's step.
* :class:`Centred`: any torch optimizer, its final step centred; for adaptive ones.
"""

from fedzmg.optim.centred import Centred, zero_mean_
from fedzmg.optim.zero_mean_sgd import ZeroMeanSGD

__all__ = ["Centred", "ZeroMeanSGD", "zero_mean_"]
