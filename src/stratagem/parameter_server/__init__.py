"""Parameter servers: processes that store variables, and everything that trains with them.

Who speaks:

1. The coordinator is the user's program. `clusters.py` starts servers and workers, here or on Ray,
   and learns their addresses; `strategy.py` makes the strategy from them.
2. The coordinator creates variables on the servers (`keras/variable.py` over `client/client.py`)
   and sends optimizers to them. A variable is on one server, or split by rows over several
   (`client/shard_layout.py`).
3. It pickles a function once (`keras/pickling.py`, `coordinator/shipping.py`) and sends its number
   and arguments to a free worker, taken from one queue (`coordinator/closure_queue.py`).
4. The worker runs the function (`coordinator/worker.py`). A step pulls values and rows, computes,
   and pushes gradients (`client/remote_steps.py`); a server applies them (`server/pushes.py`) and
   answers with the new values. Workers never speak with each other.
5. The worker answers the coordinator, which sets the function's `RemoteValue`.

Requests and answers are messages over ZeroMQ (`group/transport/`), on sockets that only processes
with the cluster's secret can use.

What each side promises:

- A client numbers its requests. A server makes a change once, however often the request comes
  (`server/changes.py`), and an answer means that it was made.
- A server answers a question whether it still works on a request, however busy it is. A client
  waits as long as it does, and gives up after `STRATAGEM_PEER_TIMEOUT_S` of silence.
- Updates are asynchronous, bounded in staleness, or synchronous: then a server waits for all
  workers, and the coordinator lets the servers go on where a lost worker would block the others.
- With a journal, a server that starts again has all changes up to its last entry, or, if it is
  durable, all that it has answered; what was lost is counted and reported.

When one dies:

- A worker: its function runs again on another one, which does not repeat the updates that the first
  run made. `launch/restart/` decides whether and when the worker starts again.
- A server: it starts again from its journal, at a new address. Clients look for it, send their
  request again, and send optimizers that it knows only by name.
- The coordinator: workers and servers end with it. A new one continues from a checkpoint.
"""
