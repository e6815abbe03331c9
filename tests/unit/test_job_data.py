"""The main job's text and batches."""

from __future__ import annotations

import torch

from torchft.examples.local_sgd.data import Corpus, read_text


def test_parts_of_the_text_are_disjoint_and_nobody_trains_on_the_held_out_one() -> None:
    # Each block is one byte repeated, so that a batch shows where it comes from.
    text = b"".join(bytes([index]) * 100 for index in range(120))
    corpora = [Corpus(text, part, 2, 16) for part in range(2)]
    block = len(text) // (20 * 2)
    assert block == 300
    seen = [
        {int(byte) for key in range(300) for byte in corpus.batch(8, (part, key))[0].flatten().unique()}
        for part, corpus in enumerate(corpora)
    ]
    held_out = {int(byte) for inputs, _ in corpora[0].validation(8, 8) for byte in inputs.unique()}
    assert seen[0].isdisjoint(seen[1])
    assert held_out == {57, 58, 59, 117, 118, 119}
    assert held_out.isdisjoint(seen[0] | seen[1])


def test_batches_are_decided_by_their_key_and_targets_follow_inputs() -> None:
    corpus = Corpus(bytes(range(256)) * 100, 0, 1, 16)
    inputs, targets = corpus.batch(4, (1, 2, 3))
    assert inputs.shape == targets.shape == (4, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(targets, (inputs + 1) % 256)
    assert torch.equal(corpus.batch(4, (1, 2, 3))[0], inputs)
    for other in ((0, 2, 3), (1, 3, 2), (1, 2)):
        assert not torch.equal(corpus.batch(4, other)[0], inputs)


def test_the_standard_library_is_enough_text() -> None:
    text = read_text(None)
    assert len(text) > 2_000_000
    assert text.count(b"import") > 1000
