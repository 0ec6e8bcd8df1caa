"""Job plans as JSON."""

from __future__ import annotations

from stratagem.launch.remote.jobs.lockstep import JobPlan, answer_key


def test_plan_survives_as_text() -> None:
    plan = JobPlan(
        nonce="n",
        command=("train.py", "--name", "it's"),
        cluster={"worker": ["a:1"]},
        tasks=(("worker", 0),),
        head="a:1",
        url="http://a:2",
        lease_s=3.5,
        heartbeat_s=0.5,
    )
    assert JobPlan.from_json(plan.to_json()) == plan


def test_program_learns_where_ray_is_where_that_is_known() -> None:
    alone = JobPlan(nonce="n", command=())
    assert alone.variables() == {"STRATAGEM_REMOTE_JOB": "n", "PYTHONUNBUFFERED": "1"}
    assert JobPlan(nonce="n", command=(), head="a:1").variables()["RAY_ADDRESS"] == "a:1"


def test_key_of_an_answer_is_of_the_token_and_of_the_job(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    assert answer_key("n") == b"secret n"
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    (tmp_path / "token").write_text("of a file\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert answer_key("n") == b"of a file n"
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert answer_key("n") == b" n"
