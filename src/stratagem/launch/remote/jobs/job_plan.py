"""Plan of a job, sent as JSON in the job's command."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from stratagem.launch.remote.ray.ray_cluster import read_token

JOB_VARIABLE = "STRATAGEM_REMOTE_JOB"
"""Environment variable of programs that a client has sent: the nonce of their job."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobPlan:
    """Program, tasks and limits of a job.

    In `command`, arguments for this Python, "{answer}" stands for the answer file. `nonce` is a
    random number that only client and job share. An empty `cluster` is a plain Ray cluster; without
    `tasks` one process runs on the head. An empty `head` or `url` (where the head accepts jobs)
    asks Ray. The job continues for `lease_s` without its client, or forever if None; it sends a
    heartbeat every `heartbeat_s`, or none if None. `answers` is the task whose answer is returned
    unless another fails, None for the first. `python` is the version that a pickled function needs,
    such as "3.11"; "" for any.
    """

    nonce: str
    command: tuple[str, ...]
    cluster: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tasks: tuple[tuple[str, int], ...] = ()
    head: str = ""
    url: str = ""
    lease_s: float | None = None
    heartbeat_s: float | None = None
    answers: tuple[str, int] | None = None
    python: str = ""

    def to_json(self) -> str:
        """Returns the plan as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> JobPlan:
        """Parses the result of `to_json`."""
        content: dict[str, Any] = json.loads(text)
        content["command"] = tuple(content["command"])
        content["tasks"] = tuple((kind, index) for kind, index in content["tasks"])
        content["answers"] = tuple(content["answers"]) if content["answers"] else None
        return cls(**content)

    def variables(self) -> dict[str, str]:
        """Returns the environment variables of each process of the program."""
        found = {JOB_VARIABLE: self.nonce, "PYTHONUNBUFFERED": "1"}
        return {**found, "RAY_ADDRESS": self.head} if self.head else found


def answer_key(nonce: str) -> bytes:
    """Returns the key with which a job signs its answer."""
    return f"{read_token()} {nonce}".encode()
