"""The same rounds of federated averaging in several systems, on one machine, in one run."""
