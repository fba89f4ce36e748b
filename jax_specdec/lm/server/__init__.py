"""`jax-specdec serve`: an engine behind the API of OpenAI.

A request passes a `Connection`, which bounds bytes and time; the `Server`, which checks host, key
and JSON; `read_request`, which checks parameters; the `Worker`, the one thread that steps the
driver; and an `Answer`, which turns updates into text for the client.
"""
