"""Several processes that serve one port, with one scheduler process between them.

A worker does all of HTTP: clients' connections, bodies, attempts, relaying. The scheduler process
has the fleet, its health, the ledger, the queue, predictors, metrics and /admin. They talk over a
Unix socket (``messages``), each side's messages of one turn of the event loop in one write.

    supervisor   starts the others, holds their listening sockets, restarts those that die
    worker       ``processes.worker``, whose attempts ask ``remote.RemoteDispatcher``
    scheduler    the usual gateway (``wiring``), with a ``hub.Hub`` for its workers

When a worker dies, the hub settles its requests. When the scheduler dies, each worker continues
with its last view and a scheduler of its own (``remote``), and gives the new one the open requests.
"""

# The environment variable by which the supervisor gives all of its processes one secret: for the
# keys of prompts, and the key of /admin.
SECRET_ENV = "HETERO_GATEWAY_PROCESS_SECRET"
