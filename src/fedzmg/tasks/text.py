"""The paper's text task: the next character of a role's lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedzmg.data.columns import Columns
from fedzmg.data.federated import FederatedData, examples
from fedzmg.data.text import Remainder, Sequences, Unknown, encode, sequences
from fedzmg.evaluation import ACCURACY, Metric
from fedzmg.models.networks import shakespeare_gru
from fedzmg.models.objective import cross_entropy, masked_cross_entropy
from fedzmg.tasks.preset import Preset, decision
from fedzmg.tasks.source import Selection, load, owners_of, selected, test_owners
from fedzmg.tasks.task import Protocol, Task


def token_ids(x: Tensor, _dtype: torch.dtype) -> Tensor:
    """Convert ids stored as bytes to the integers that an embedding reads."""
    return x.long()


def masked_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute each example's accuracy over the positions that have a target."""
    valid = targets >= 0
    right = (valid & (outputs.argmax(-1) == targets)).flatten(1).sum(1)
    return right.to(outputs.dtype) / valid.flatten(1).sum(1).clamp(min=1)


MASKED_ACCURACY = Metric("accuracy", masked_accuracy)


@dataclass(frozen=True)
class NextCharacter(Preset):
    """The next character of plays; every speaking role is a client.

    A role's snippets are joined end to end and cut into windows of length + 1 characters. The
    model reads all but the last and predicts all but the first. A role with too little text stays
    in the population and contributes nothing when it is drawn.

    The paper's GRU has 4,022,850 parameters. Its protocol: 1000 rounds, 10 clients, 4 epochs,
    batches of 8. Partial batches are dropped: a role of fewer than 808 characters takes no step;
    protocol.keep_partial=true keeps them. The paper's text names the thresholds 35 and 45 %, its
    tables 20 and 33 %; protocol.threshold is the first of the text.

    With partial_sequences=pad the end of a role's text becomes a padded sequence. Loss and
    accuracy are means over a sequence's own characters, and sequences count equally: a character
    in a short sequence weighs more than one in a whole sequence.
    """

    length: int = decision(100, "characters in a sequence", low=1)
    oov: Unknown = decision("last", "id of an unknown character: the last, or the author's 0")
    partial_sequences: Remainder = decision("drop", "drop or pad the end of a role's text")
    selection: Selection = decision("half", "test sequences used for reports: half or all")
    initializer: Literal["keras", "torch"] = decision(
        "keras", "library whose initial weights are used"
    )

    @property
    def protocol(self) -> Protocol:
        return Protocol(
            rounds=1000,
            cohort=10,
            batch_size=8,
            epochs=4,
            straddle=False,
            keep_partial=False,
            eval_every=5,
            threshold=0.35,
        )

    def network(self) -> nn.Module:
        return shakespeare_gru()

    def build(self) -> Task:
        data = load(self.data)
        train, test = (self._cut(data.splits[split]) for split in ("train", "test"))
        padded = self.partial_sequences == "pad"
        tune, report = selected(
            examples(test.inputs, test.targets, what="test data"), self.selection
        )
        names, test_names = (owners_of(data.splits[s], self.data).names for s in ("train", "test"))
        return self.assembled(
            FederatedData(
                examples(train.inputs, train.targets, what="training data"), train.offsets, names
            ),
            tune,
            report,
            test_owners=test_owners(names, test_names, np.diff(test.offsets), self.selection),
            loss=masked_cross_entropy if padded else cross_entropy,
            metric=MASKED_ACCURACY if padded else ACCURACY,
            prepare=token_ids,
            init=self.initializer,
            notes=data.notes,
        )

    def _cut(self, columns: Columns) -> Sequences:
        snippets = columns.strings("text")
        # A client's rows are adjacent: its stream is one slice of the text.
        borders = snippets.offsets[owners_of(columns, self.data).offsets]
        return sequences(
            *encode(snippets.text, borders, self.oov), self.length, self.partial_sequences
        )
