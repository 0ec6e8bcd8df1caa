"""What a client asks a job to do, as text in the command of the job."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from stratagem.remote.ray.ray_cluster import read_token

__all__ = ["JOB_VARIABLE", "JobPlan", "answer_key"]

JOB_VARIABLE = "STRATAGEM_REMOTE_JOB"
"""Set where a program runs that a client has sent, to the number of its job."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobPlan:
    """What a job is to do.

    Args:
        nonce: a number that only the client and the job know.
        command: the arguments of this Python; "{answer}" stands for the file of an answer.
        cluster: the tasks of the cluster and their addresses; {} for one that is none of ours.
        tasks: types and indices of those that run the program; () for one process on the head.
        head: the address of Ray; "" for what Ray says.
        url: at which the head takes jobs, as seen from itself; "" for what Ray says.
        lease_s: how long the job goes on without its client; None for ever.
        answers: the task whose answer is the job's, unless another one fails; None for the first.
        python: the version that a pickled function needs, such as "3.11"; "" for any.
    """

    nonce: str
    command: tuple[str, ...]
    cluster: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tasks: tuple[tuple[str, int], ...] = ()
    head: str = ""
    url: str = ""
    lease_s: float | None = None
    answers: tuple[str, int] | None = None
    python: str = ""

    def to_json(self) -> str:
        """Returns it as text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> JobPlan:
        """Returns the plan that `to_json` has made to text.

        Args:
            text: that text.
        """
        content: dict[str, Any] = json.loads(text)
        content["command"] = tuple(content["command"])
        content["tasks"] = tuple((kind, index) for kind, index in content["tasks"])
        content["answers"] = tuple(content["answers"]) if content["answers"] else None
        return cls(**content)

    def variables(self) -> dict[str, str]:
        """Returns the variables that each process of the program gets."""
        found = {JOB_VARIABLE: self.nonce, "PYTHONUNBUFFERED": "1"}
        return {**found, "RAY_ADDRESS": self.head} if self.head else found


def answer_key(nonce: str) -> bytes:
    """Returns the key by which a job signs its answer.

    Args:
        nonce: of the job.
    """
    return f"{read_token()} {nonce}".encode()
