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
from fedzmg.models.paper import shakespeare_gru
from fedzmg.tasks.losses import cross_entropy, masked_cross_entropy
from fedzmg.tasks.preset import Preset, decision
from fedzmg.tasks.source import Selection, load, owners_of, selected, test_owners
from fedzmg.tasks.task import Protocol, Task


def token_ids(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Ids are stored as bytes; an embedding reads whole numbers of eight."""
    del dtype
    return x.long()


def masked_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Share of right characters per example, over the positions that have a target."""
    valid = targets >= 0
    right = (valid & (outputs.argmax(-1) == targets)).flatten(1).sum(1)
    return right.to(outputs.dtype) / valid.flatten(1).sum(1).clamp(min=1)


MASKED_ACCURACY = Metric("accuracy", masked_accuracy)


@dataclass(frozen=True)
class NextCharacter(Preset):
    """The next character of plays; every speaking role is a client.

    A role's snippets are joined end to end and cut into windows of length + 1 characters: the
    model reads all but the last and is to say all but the first. A role with too little text
    keeps its place in the population and contributes nothing when it is drawn.

    The paper's GRU with 4,022,850 parameters and its protocol: 1000 rounds, 10 clients, 4 epochs,
    batches of 8. Batches that are not full are dropped, so a role of fewer than 808 characters
    makes no step; protocol.keep_partial=true keeps them. The paper's text names the thresholds 35
    and 45 %, its tables 20 and 33 %; protocol.threshold is the first of the text.

    With partial_sequences=pad the end of a role's text is kept as a sequence whose padding is
    ignored. Loss and accuracy of a sequence are means over its own characters and sequences count
    equally, so a character in a short sequence weighs more than one in a whole sequence.
    """

    data_set: str
    roles: int
    length: int = decision(100, "characters in a sequence", low=1)
    oov: Unknown = decision("last", "an unknown character is the last id, or the author's: id 0")
    partial_sequences: Remainder = decision("drop", "what becomes of the end of a role's text")
    selection: Selection = decision("half", "test sequences that report: half of them, or all")
    initializer: Literal["keras", "torch"] = decision("keras", "which library's initial weights")

    @property
    def data(self) -> str:
        return self.data_set

    @property
    def clients(self) -> int:
        return self.roles

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
        return self.assembled(
            FederatedData(
                examples(train.inputs, train.targets, what="training data"),
                train.offsets,
                owners_of(data.splits["train"], self.data).names,
            ),
            tune,
            report,
            test_owners=test_owners(
                owners_of(data.splits["train"], self.data).names,
                owners_of(data.splits["test"], self.data).names,
                np.diff(test.offsets),
                self.selection,
            ),
            loss=masked_cross_entropy if padded else cross_entropy,
            metric=MASKED_ACCURACY if padded else ACCURACY,
            prepare=token_ids,
            init=self.initializer,
            notes=data.notes,
        )

    def _cut(self, columns: Columns) -> Sequences:
        snippets = columns.strings("text")
        # Rows lie end to end in a client's order, so a client's stream is one piece of the text.
        borders = snippets.offsets[owners_of(columns, self.data).offsets]
        return sequences(
            *encode(snippets.text, borders, self.oov), self.length, self.partial_sequences
        )
