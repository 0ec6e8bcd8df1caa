"""Jobs of a Ray cluster as a client sees them: the package sent, requests, the log followed.

Ray's `JobSubmissionClient` does the requests, through one port of the head. `protocol.py` describes
what client and job say to each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fnmatch
import functools
import io
import logging
import os
import queue
import site
import ssl
import sys
import sysconfig
import threading
import time
import zipfile
from collections.abc import (
    AsyncGenerator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from types import ModuleType
from typing import Any

from stratagem import environment, settings
from stratagem.environment import load
from stratagem.errors import UnavailableError, explain, invalid
from stratagem.group.authentication.secret import read_ray_token
from stratagem.launch.remote.protocol import (
    FrameReader,
    LogFrame,
    lease_path,
    renewal_s,
)
from stratagem.launch.remote.ray_cluster import load_ray
from stratagem.launch.tasks.output import STDERR, STDOUT, Screen, TaskOutput, write_text
from stratagem.resources import Closing, TemporaryFolder

# Package of a program's files: its folder, and loaded modules that are not installed.
#
# Ray's own packages have no limit whose error names the large files, and other rules.

# Never sent: caches, environments, and names that begin with a dot.
_LEFT_OUT = (".*", "__pycache__", "*.pyc", "node_modules", "*.egg-info")
_NUM_LARGEST = 5
# The date of every file: Ray recognizes equal packages by their contents, and uploads them once.
_DATE = (1980, 1, 1, 0, 0, 0)


def local_modules(loaded: Mapping[str, ModuleType] | None = None) -> dict[str, Path]:
    """Returns file or folder of each loaded top-level module outside Python and its packages."""
    installed = _installed_folders()
    found: dict[str, Path] = {}
    for name, module in list((sys.modules if loaded is None else loaded).items()):
        if "." in name or name in ("__main__", "__mp_main__", "stratagem"):
            continue  # the parent of a submodule is loaded, too
        folders = list(getattr(module, "__path__", None) or ())
        file = folders[0] if folders else getattr(module, "__file__", None)
        if file is None or not Path(file).exists():
            continue
        path = Path(file).resolve()
        if not any(path.is_relative_to(one) for one in installed):
            found[name] = path
    return found


def pack(
    folder: Path | None,
    modules: Mapping[str, Path],
    *,
    more: Mapping[str, bytes] | None = None,
    excludes: Sequence[str] = (),
) -> bytes:
    """Returns an archive of files, to be unpacked where the program runs.

    Packs all of `folder`, `modules` (files of `folder` take precedence) and `more` files by
    content. `excludes` are patterns of names or paths, such as "*.csv" or "data/raw"; caches,
    virtual environments and names that begin with a dot are never packed. Raises ValueError above
    `STRATAGEM_UPLOAD_LIMIT_BYTES`.
    """
    limit = int(settings.read("upload_limit_bytes"))
    files: dict[str, Path] = {}
    sizes: dict[str, int] = {}
    for name, path in _all_files(folder, modules, (*_LEFT_OUT, *excludes)):
        if name in files:
            continue
        files[name] = path
        part = name.partition("/")[0]
        sizes[part] = sizes.get(part, 0) + path.stat().st_size
        if sum(sizes.values()) > limit:
            raise ValueError(_too_large(folder, sizes, limit))
    written = io.BytesIO()
    contents = {name: path.read_bytes() for name, path in files.items()} | dict(more or {})
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(contents.items()):
            archive.writestr(zipfile.ZipInfo(name, _DATE), content, zipfile.ZIP_DEFLATED)
    return written.getvalue()


def _all_files(
    folder: Path | None, modules: Mapping[str, Path], excludes: Sequence[str]
) -> Iterator[tuple[str, Path]]:
    """Yields files with their names in the archive; the first of a name wins."""
    roots = {} if folder is None else {"": folder}
    for top, place in modules.items():
        if folder is None or not place.is_relative_to(folder):
            roots[f"{top}/"] = place
    for prefix, root in roots.items():
        if root.is_file():
            yield root.name, root
        for current, folders, names in os.walk(root):
            here = Path(current)
            folders[:] = sorted(
                name
                for name in folders
                if not _is_excluded((here / name).relative_to(root), excludes)
                and not (here / name / "pyvenv.cfg").exists()
            )
            for path in (here / name for name in sorted(names)):
                own = path.relative_to(root)
                if not _is_excluded(own, excludes) and path.is_file():
                    yield prefix + own.as_posix(), path


def _is_excluded(path: Path, excludes: Iterable[str]) -> bool:
    return any(
        fnmatch.fnmatch(path.name, one) or fnmatch.fnmatch(path.as_posix(), one.rstrip("/"))
        for one in excludes
    )


def _too_large(folder: Path | None, sizes: Mapping[str, int], limit: int) -> str:
    largest = sorted(sizes, key=lambda part: -sizes[part])[:_NUM_LARGEST]
    named = ", ".join(f"{part} ({sizes[part]:,} bytes so far)" for part in largest)
    return explain(
        f"The program's files are larger than {limit:,} bytes; the largest are {named}.",
        expected=f"source code and small files only in {folder}.",
        fix='pass excludes=["..."], move data to storage that the servers can read, or raise '
        "STRATAGEM_UPLOAD_LIMIT_BYTES.",
    )


def _installed_folders() -> list[Path]:
    folders = [*sysconfig.get_paths().values(), *site.getsitepackages(), sys.base_prefix]
    # Debian's folder, and `pip install --user`'s; a virtual environment may be in the folder.
    folders += [site.getusersitepackages(), sys.prefix]
    roots = {Path(folder).resolve() for folder in folders if folder}
    return [root for root in roots if root != Path(root.anchor)]


# Requests to the head.

_REQUEST_S = 30.0
_NOT_FOUND = 404
_UPLOAD_S = 600.0


class JobsClient:
    """Ray's client of jobs, for the head whose dashboard has this URL.

    Each request ends in time, and its errors say what to do. `token` is "" for none, None for the
    one on this machine.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise invalid(
                f"A job cannot be sent to {url!r}.",
                expected="the address of the dashboard of a Ray cluster.",
                fix="pass HOST:8265, or a URL that begins with http:// or https://.",
            )
        self.url = url.rstrip("/")
        token = read_ray_token(environment.snapshot()) if token is None else token
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def connect(self) -> None:
        """Asks the head once; raises UnavailableError or PermissionError."""
        with self._explained():
            self._client.get_version()

    def machines(self) -> list[dict[str, float]]:
        """Returns the resources of each machine that has joined."""
        with self._explained():
            answer = self._client.request("GET", "/api/v0/nodes?detail=1&limit=10000").json()
            nodes = answer["data"]["result"]["result"]
            return [node["resources_total"] or {} for node in nodes if node["state"] == "ALIVE"]

    def submit(
        self, command: str, package: bytes, variables: Mapping[str, str], **metadata: str
    ) -> str:
        """Starts a job, a command for a shell in the unpacked package; returns its name."""
        with TemporaryFolder("stratagem-package-") as folder:
            path = folder.path / "package.zip"
            path.write_bytes(package)
            runtime_env = {"working_dir": str(path), "env_vars": dict(variables)}
            with self._explained():
                return self._client.submit_job(
                    entrypoint=command, runtime_env=runtime_env, metadata=metadata
                )

    def details(self, job: str) -> Any:
        """Returns Ray's `JobDetails` of a job: status, message, exit code of its command."""
        with self._explained():
            return self._client.get_job_info(job)

    def running(self) -> dict[str, dict[str, str]]:
        """Returns the metadata of the jobs that have not ended."""
        with self._explained():
            return {
                one.submission_id: one.metadata or {}
                for one in self._client.list_jobs()
                if one.submission_id and not one.status.is_terminal()
            }

    def stop(self, job: str) -> None:
        """Stops a job with SIGTERM, and SIGKILL after a while."""
        with self._explained():
            self._client.stop_job(job)

    def renew(self, nonce: str, number: int) -> None:
        """Renews the lease of a job."""
        with self._explained():
            path = lease_path(nonce, number)
            self._client.request("PUT", path, data=b"-", timeout=_REQUEST_S).raise_for_status()

    def is_renewed(self, nonce: str, number: int) -> bool:
        """Returns True if the client of a job has renewed its lease so often."""
        with self._explained():
            answer = self._client.request("GET", lease_path(nonce, number))
            if answer.status_code == _NOT_FOUND:
                return False
            answer.raise_for_status()
            return True

    async def log(self, job: str) -> AsyncGenerator[str]:
        """Yields the log of a job from its beginning, in parts as they arrive."""
        with self._explained():
            async for text in self._client.tail_job_logs(job):
                yield text

    @functools.cached_property
    def _client(self) -> Any:
        load_ray()
        jobs = load("ray.job_submission", needed_by="a remote job", install="stratagem[ray]")
        for module in ("dashboard_sdk", "job.sdk"):  # each upload and each end of a log is reported
            logging.getLogger(f"ray.dashboard.modules.{module}").setLevel(logging.WARNING)

        class Bounded(jobs.JobSubmissionClient):
            def __init__(self, url: str, headers: dict[str, str]) -> None:
                super().__init__(url, headers=headers)
                # Ray's None, of which aiohttp warns: an error where warnings are errors.
                self._ssl_context = self._ssl_context or ssl.create_default_context()

            def request(self, method: str, path: str, **options: Any) -> Any:
                return self._do_request(method, path, **options)

            def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
                # Ray sets no limit, and a head that was stopped still accepts connections.
                limit_s = _UPLOAD_S if method == "PUT" else _REQUEST_S
                return super()._do_request(method, endpoint, **{"timeout": limit_s, **options})

        # It would obey RAY_ADDRESS rather than its argument.
        with environment.changed(RAY_API_SERVER_ADDRESS=self.url):
            return Bounded(self.url, dict(self._headers))

    @contextlib.contextmanager
    def _explained(self) -> Generator[None]:
        """Raises PermissionError or UnavailableError for the many errors of Ray's client."""
        try:
            yield
        except ImportError:
            raise
        except Exception as error:
            if isinstance(error, load_ray().exceptions.AuthenticationError):
                raise PermissionError(
                    explain(
                        f"The cluster at {self.url} refused this client.",
                        expected="the token with which its servers were started.",
                        fix="set RAY_AUTH_TOKEN to it, or RAY_AUTH_TOKEN_PATH to a file that "
                        "contains it.",
                        code="SG513",
                    )
                ) from error
            raise UnavailableError(
                explain(
                    f"The cluster at {self.url} is not available: {error}.",
                    expected="a running leader that accepts jobs at this port.",
                    fix="check address and port, and the output of `stratagem server` on the "
                    "leader.",
                    code="SG514",
                )
            ) from error


_CLOSING_S = 2.0


class Lease(Closing):
    """Renews the lease of a job until it is closed; without it the job ends after `limit_s`."""

    def __init__(self, jobs: JobsClient, nonce: str, limit_s: float) -> None:
        self._jobs = jobs
        self._nonce = nonce
        self._pause_s = renewal_s(limit_s)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="client lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the renewals."""
        self._is_closed.set()
        self._thread.join(_CLOSING_S)  # it may wait for an answer that will not come

    def _renew(self) -> None:
        number = 1
        while not self._is_closed.is_set():
            try:
                self._jobs.renew(self._nonce, number)
            except (UnavailableError, PermissionError):
                pass  # tried again; following the log reports the error
            else:
                number += 1
            self._is_closed.wait(self._pause_s)


# Display of a job's output on the screen of its client.

_STREAMS = {"out": STDOUT, "err": STDERR}


class JobOutput:
    """Shows the output of a job's tasks as a launcher does, each line behind the task's name.

    Without task names there is one process, whose output is shown unchanged, with moving progress
    bars.
    """

    def __init__(self, tasks: Sequence[str]) -> None:
        screen = Screen(tasks) if tasks else None
        self._outputs = {task: TaskOutput(task, screen) for task in tasks}

    def show(self, frame: LogFrame) -> None:
        """Shows a frame of kind "out" or "err"."""
        stream = _STREAMS[frame.kind]
        if self._outputs:
            output = self._outputs[frame.task]
            output.take(frame.text.encode(), time.monotonic(), stream=stream)
            return
        write_text((sys.stdout, sys.stderr)[stream], frame.text)

    def show_overdue(self) -> None:
        """Shows unfinished lines that have waited too long."""
        for output in self._outputs.values():
            output.show_overdue(time.monotonic())

    def show_rest(self) -> None:
        """Shows all unfinished lines."""
        for output in self._outputs.values():
            output.show_rest(time.monotonic())


# The log of a job, followed to its end.

_POLL_S = 0.25
_RETRY_S = 1.0
# Kinds of frames whose texts are returned or looked at.
_KEPT = ("answer", "end", "note", "started")
HEARTBEATS_PER_LIMIT = 3
"""Number of heartbeats of a job within `STRATAGEM_PEER_TIMEOUT_S`."""


@dataclasses.dataclass(frozen=True)
class JobResult:
    """Result of a job: exit code of its program, signed answer ("" without one), and notes."""

    code: int
    answer: str
    notes: str


def follow(
    jobs: JobsClient,
    job: str,
    nonce: str,
    output: JobOutput,
    should_leave: Callable[[], bool] = lambda: False,
    on_heard: Callable[[], object] = lambda: None,
) -> JobResult | None:
    """Shows the output of a job until it ends; returns None once `should_leave()`.

    `on_heard` is called when the job first says something. Raises UnavailableError if the cluster
    stops responding, cannot start the program, or has none of its heartbeats.
    """
    reader = FrameReader(nonce)
    texts: dict[str, list[str]] = {kind: [] for kind in _KEPT}
    peer_s = float(settings.read("peer_timeout_s"))
    limit_s, is_heard = float(settings.read("join_timeout_s")), False
    heard_s = time.monotonic()
    with _log_of(jobs, job, peer_s) as log:
        while not texts["end"]:
            if should_leave():
                return None
            try:
                item = log.get(timeout=_POLL_S)
            except queue.Empty:
                item = ""
            if isinstance(item, Exception):
                raise item
            if not isinstance(item, str):
                output.show_rest()
                return _result_without_end(item, texts, reader)
            for frame in reader.feed(item):
                if not is_heard:
                    on_heard()
                # For the first half, the log may be without a connection.
                limit_s, is_heard, heard_s = 2 * peer_s, True, time.monotonic()
                if frame.kind in texts:
                    texts[frame.kind].append(frame.text)
                elif frame.kind != "heartbeat":
                    output.show(frame)
                if frame.kind == "note":
                    print(frame.text, file=sys.stderr, flush=True)
            output.show_overdue()
            if time.monotonic() - heard_s > limit_s:
                raise _unheard(job, limit_s, is_heard=is_heard)
    output.show_rest()
    return JobResult(int(texts["end"][-1]), "".join(texts["answer"]), "\n".join(texts["note"]))


def _result_without_end(
    details: Any, texts: Mapping[str, list[str]], reader: FrameReader
) -> JobResult:
    """Returns the result of a job that ended without an "end" frame."""
    if not texts["started"] and details.status != "STOPPED":
        reason = "\n".join(reader.others) or details.message
        raise UnavailableError(
            explain(
                f"The cluster could not start the program ({details.status.value}): {reason}",
                expected="servers with the same version of stratagem as this client.",
                fix="check the output of `stratagem server` on the leader, and logs in /tmp/ray.",
            )
        )
    return JobResult(details.driver_exit_code or 1, "", "\n".join(texts["note"]))


def _unheard(job: str, limit_s: float, *, is_heard: bool) -> UnavailableError:
    what = "has sent no heartbeat" if is_heard else "has not started"
    setting = "twice STRATAGEM_PEER_TIMEOUT_S" if is_heard else "STRATAGEM_JOIN_TIMEOUT_S"
    return UnavailableError(
        explain(
            f"The program of job {job} {what} for {limit_s:g} s: it was stopped, or its machine is "
            "lost or overloaded.",
            expected=f"a sign of life within {setting}.",
            fix="check the leader's machine, and run the program again: it resumes from its last "
            "checkpoint.",
            code="SG514",
        )
    )


@contextlib.contextmanager
def _log_of(jobs: JobsClient, job: str, limit_s: float) -> Generator[queue.SimpleQueue[Any]]:
    """Reads a log in another thread, so that this one notices an interruption at once.

    Yields the queue of its parts; finally it has the last details of the job, or an error.
    """
    items: queue.SimpleQueue[Any] = queue.SimpleQueue()
    loop = asyncio.new_event_loop()
    reading = loop.create_task(_read_log(jobs, job, limit_s, items))

    def run() -> None:
        try:
            loop.run_until_complete(reading)
        except asyncio.CancelledError:
            pass
        except Exception as error:  # noqa: BLE001 - raised by follow()
            items.put(error)
        finally:
            loop.close()

    thread = threading.Thread(target=run, name="log of a job", daemon=True)
    thread.start()
    try:
        yield items
    finally:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(reading.cancel)
        thread.join(_CLOSING_S)  # it may wait for an answer that will not come


async def _read_log(
    jobs: JobsClient, job: str, limit_s: float, items: queue.SimpleQueue[Any]
) -> None:
    """Reads the log until the job has ended, and again when the connection is lost.

    A job sends heartbeats, so a quiet log is a connection that died, or a job that did.
    """
    failed_s: float | None = None
    has_ended = False
    while True:
        is_broken = False
        try:
            async with (
                asyncio.timeout(limit_s) as quiet,
                contextlib.aclosing(jobs.log(job)) as parts,
            ):
                async for text in parts:
                    failed_s = None if text else failed_s
                    quiet.reschedule(asyncio.get_running_loop().time() + limit_s)
                    items.put(text)
        except TimeoutError:
            pass  # the job's state tells more
        except UnavailableError:
            is_broken = True
        try:
            details = jobs.details(job)
        except UnavailableError as error:
            failed_s = failed_s or time.monotonic()
            if time.monotonic() - failed_s > limit_s:
                raise UnavailableError(
                    explain(
                        f"The cluster has not responded about job {job} for {limit_s:g} s: "
                        f"{str(error).splitlines()[0]}",
                        expected="a leader that runs and can be reached.",
                        fix="check the leader, start it again, and run the program again: it "
                        "resumes from its last checkpoint. STRATAGEM_PEER_TIMEOUT_S changes the "
                        "limit.",
                        code="SG514",
                    )
                ) from error
        else:
            failed_s = None
            # A job may end while its log is without a connection: it is read once more then.
            if details.status.is_terminal() and (has_ended or not is_broken):
                items.put(details)
                return
            has_ended = details.status.is_terminal()
        await asyncio.sleep(_RETRY_S)
        # Ends an incomplete line: the log is read from its beginning.
        items.put("\n")
