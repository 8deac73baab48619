"""FedIT (Zhang et al. 2023) and FFA-LoRA (Sun et al. 2024): averages of low-rank adapters.

For a model with adapters (``fedzmg.models.add_lora``), ``W = W0 + s B A`` with a constant ``W0``::

    client:  (A_k, B_k) <- (A_k, B_k) - lr g           fedit
             B_k        <- B_k - lr g                  ffa-lora: A keeps its initial values
    server:  A, B       <- sum_k p_k A_k, sum_k p_k B_k

Travels down and up: the factors that are trained, ``r (n_in + n_out)`` numbers of a layer with rank
``r`` or, without A, ``r n_out``. State: none.

The product of averages is not the average of products. FedIT's error is the covariance
``sum_k p_k (B_k - B)(A_k - A)``; with a common A there is none. FLoRA merges products instead.
FedZMG on adapters is ``fedit`` with ``client.zero_mean=true``, or ``fedzmg`` itself: A's rows are
centred and A's gradients projected over the layer's inputs, B is left alone. ``W 1 = W0 1`` then
holds in all rounds.

Degenerate cases: in a model without adapters both are FedAvg. With weights that other algorithms
move (``add_lora(merge=True)``), these stay constant.
"""

from fedzmg.algorithms.fedavg import SGD, Average
from fedzmg.contract import Algorithm, Parts

ALGORITHMS = (
    Algorithm("fedit", SGD(), Average(), parts=Parts(frozen=("lora_base",))),
    Algorithm("ffa-lora", SGD(), Average(), parts=Parts(frozen=("lora_A", "lora_base"))),
)
