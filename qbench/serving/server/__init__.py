"""The network face of a served engine: Open Inference Protocol v2 over HTTP, texts, metrics.

What an engine takes is in ``contract`` and ``bounds``; bodies are read in ``bodies``, ``wire``,
``terms`` and ``texts`` and written in ``replies``; ``asking`` hands a request's rows to the
service, and ``failing`` says which failure has which status. ``documents`` and ``metrics`` are
what the server tells of itself. ``app`` joins these under addresses, ``transport`` bounds
connections and headers, and ``host`` is the process: it listens, becomes ready, and drains.
"""
