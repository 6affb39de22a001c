"""How a benchmark talks to a peer: one JSON object a line, on standard input and output.

A peer loads its model, prints `{"ready": true}`, and then answers each line `{"streams": N, "prompts": [[ids], ...],
"max_tokens": M}` with `{"seconds": S, "tokens": T}`: the time until all prompts have M output tokens. It stays loaded
and idle in between, so that peers can be measured in turn. It imports only the standard library here, since it may run
in an environment without Holdback.
"""

import json
import os
import sys
import time

# Libraries print to standard output as they like, from their import on; the answers go to a copy that only this module
# has. So a peer imports this module first.
_answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def serve(generate):
    """Runs a peer: `generate(prompts, max_tokens)` returns the number of output tokens."""

    def answer(job):
        began = time.perf_counter()
        tokens = generate(job["prompts"], job["max_tokens"])
        return {"seconds": time.perf_counter() - began, "tokens": tokens}

    serve_jobs(answer)


def serve_jobs(answer):
    """Runs a peer with jobs of its own: `answer(job)` takes and returns what is sent as JSON."""
    print(json.dumps({"ready": True}), file=_answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=_answers, flush=True)
