"""Tensor parallel: one executor whose model is cut over several processes, the ranks of `torch.distributed`.

Rank 0 is the executor itself: it alone speaks gRPC, samples, and is known to the scheduler. It starts the other ranks
(`processes`), tells them each step before it takes part in it (`messages`), and each rank runs the step on a device of
its own with its share of the weights and of the KV heads (`rank`, `group`, `sharding`).

Rank 0's tokens are the truth: they are broadcast inside the step, so every rank's `last_token` has them; in a compiled
graph each rank samples for itself, from the same logits and with the same operations. Every rank
runs the same calls in the same order, and a rank that leaves that order can never be let back in: whatever ends or
breaks one of them ends the executor.
"""

from __future__ import annotations
