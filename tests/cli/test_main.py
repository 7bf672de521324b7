"""Exit codes, messages, streams: what the command promises whichever stage it runs."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ssdgen import __version__, pipeline
from tests.cli.conftest import Command

COMMAND = [sys.executable, "-m", "ssdgen"]
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}

BAD = """language 1
layer bad "two mistakes"
axes b t h p n
inputs
  x[b t h p] : bf16
  k[b t h n] : like y
state S[b h p n] : f32
  S[t] = S[t-1] + outer(x, kk)
output y[b t h p] : like x
  y = S[t] . k
"""


def test_version(ssdgen: Command) -> None:
    assert ssdgen("--version").out == f"ssdgen {__version__}\n"


def test_without_a_command_it_says_what_there_is(ssdgen: Command) -> None:
    result = ssdgen()
    assert result.code == 0
    commands = result.out.partition("Commands:")[2].partition("Exit codes")[0]
    assert re.findall(r"(?m)^  (\w+) ", commands) == [
        "check",
        "derive",
        "plan",
        "generate",
        "complete",
        "build",
        "verify",
        "new",
        "tune",
        "warm",
        "bench",
    ]


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["chek"], "no such command `chek`", "did you mean `check`?"),
        (["check"], "missing argument `SPEC`", "ssdgen check --help"),
        (["check", "mamba2", "--colour"], "no such option: --colour", "ssdgen check --help"),
        (["check", "mamba2", "again"], "got unexpected extra argument(s) (again)", "ssdgen check --help"),
        (["plan", "mamba2", "--config", "chunk"], "--config chunk is not KEY=VALUE", "for example --config chunk=128"),
        (
            ["plan", "mamba2", "--config", "chunk=48"],
            "--config chunk=48 is none of the values a kernel takes",
            "chunk is",
        ),
        (["plan", "mamba2", "--config", "chunks=64"], "mamba2 has no knob `chunks`", "did you mean `chunk`?"),
        (["build", "mamba2", "--arch", "sm_75"], "--arch knows no `sm_75`", "some of sm_80"),
        (["build", "mamba2", "--dtype", "fp8"], "--dtype knows no `fp8`", "some of bf16"),
        (["verify", "mamba2", "--gate", "luck"], "--gate knows no `luck`", "some of proof"),
        (["build", "mamba2", "--arch", ""], "--arch is empty", "some of sm_80"),
        (["build", "mamba2", "--dtype", ","], "--dtype is empty", "some of bf16"),
        (["verify", "mamba2", "--gate", ""], "--gate is empty", "some of proof"),
        (["verify", "mamba2", "--device", "tpu"], "--device knows no `tpu`", "some of auto"),
    ],
)
def test_wrong_usage_is_one_line_and_a_hint(ssdgen: Command, arguments: list[str], message: str, hint: str) -> None:
    """Exit code 1, nothing on standard output, no traceback, no page of usage."""
    result = ssdgen(*arguments)
    assert (result.code, result.out) == (1, "")
    assert result.err.splitlines()[0] == f"ssdgen: {message}"
    assert result.err.splitlines()[1].startswith(f"  hint: {hint}")
    assert len(result.err.splitlines()) == 2


def test_all_mistakes_of_a_spec_are_shown(ssdgen: Command) -> None:
    Path("bad.ssd").write_text(BAD)
    for command in ("check", "derive", "plan", "generate", "build", "verify"):
        result = ssdgen(command, "bad.ssd")
        assert (result.code, result.out) == (1, ""), command
        assert len(re.findall(r"(?m)^bad\.ssd:\d+:\d+: error\[E\d+\]", result.err)) == 2, command


def test_json_of_mistakes_has_their_place(ssdgen: Command) -> None:
    Path("bad.ssd").write_text(BAD)
    result = ssdgen("check", "bad.ssd", "--json")
    errors = json.loads(result.out)["errors"]
    assert (result.code, result.err) == (1, "")
    assert [(e["file"], e["line"], e["column"]) for e in errors] == [("bad.ssd", 6, 21), ("bad.ssd", 8, 28)]
    assert all(e["code"].startswith("E") and e["message"] for e in errors)


def test_json_of_wrong_usage(ssdgen: Command) -> None:
    result = ssdgen("plan", "mamba2", "--config", "chunks=64", "--json")
    assert json.loads(result.out) == {
        "errors": [{"message": "mamba2 has no knob `chunks`", "hint": "did you mean `chunk`?"}]
    }


@pytest.mark.parametrize("command", ["check", "derive", "plan"])
def test_json_of_a_stage(ssdgen: Command, command: str) -> None:
    """Every stage is JSON as it stands, expressions in the language's own notation."""
    data = json.loads(ssdgen(command, "mamba2", "--json").out)
    assert "exp(A * step)" in json.dumps(data)
    assert "span" not in json.dumps(data)


def test_the_adjoint_is_derived_and_proved(ssdgen: Command) -> None:
    """Protects `--adjoint`, as text and as JSON: the gradients and what was proved of them."""
    text = ssdgen("derive", "simple_gla", "--adjoint").out
    assert text.startswith("simple_gla: the gradients of a chunk of L tokens from d_y, d_S_end\n")
    assert "\nd_g = d_decay\n" in text
    assert re.search(r"(?m)^simple_gla: \d+ statements proved$", text)
    data = json.loads(ssdgen("derive", "simple_gla", "--adjoint", "--json").out)
    assert [g["name"] for g in data["adjoint"]["inputs"]] == ["d_q", "d_k", "d_v", "d_g"]
    assert len(data["proof"]["statements"]) > 10


def test_a_bug_is_ours(ssdgen: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 2, how to report it, and the traceback in a file."""

    def broken(spec: str) -> None:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(pipeline, "read", broken)
    result = ssdgen("check", "mamba2")
    assert (result.code, result.out) == (2, "")
    assert "Traceback" not in result.err
    assert "this is a bug in ssdgen, not a mistake of yours: ZeroDivisionError: of ours" in result.err
    (path,) = re.findall(r"report it with your spec and (\S+);", result.err)
    report = Path(path).read_text()
    Path(path).unlink()
    assert f"ssdgen {__version__}" in report
    assert "ssdgen check mamba2" in report
    assert 'raise ZeroDivisionError("of ours")' in report
    assert "Traceback" in ssdgen("check", "mamba2", "--debug").err


def test_interrupted(ssdgen: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(spec: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "read", slow)
    result = ssdgen("check", "mamba2")
    assert (result.code, result.out, result.err) == (130, "", "ssdgen: interrupted\n")


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_full_disk_is_no_bug_of_ours(form: tuple[str, ...]) -> None:
    """`ssdgen check mamba2 > /dev/full`."""
    with open("/dev/full", "w") as full:
        command = [*COMMAND, "check", "mamba2", *form]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (1, "ssdgen: cannot write the output: no space left on device\n")


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_closed_standard_output_is_no_bug_of_ours(form: tuple[str, ...]) -> None:
    """`ssdgen check mamba2 >&-`."""
    command = ["bash", "-c", 'exec "$@" >&-', "bash", *COMMAND, "check", "mamba2", *form]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (1, "ssdgen: cannot write the output: standard output is closed\n")


def test_a_closed_standard_error_is_quiet() -> None:
    command = ["bash", "-c", 'exec "$@" 2>&-', "bash", *COMMAND, "check", "nosuch"]
    assert subprocess.run(command, env=ENVIRONMENT).returncode == 1


def run_entry(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The entry point with `check mamba2` after `program`, temporary files in `folder`."""
    text = f"import sys; import ssdgen.cli\n{program}\nsys.argv[1:] = ['check', 'mamba2']\nssdgen.cli.main()"
    environment = {**ENVIRONMENT, "TMPDIR": str(folder)}
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=environment, timeout=60)


def test_interrupted_while_it_starts(tmp_path: Path) -> None:
    """Importing typer takes most of a short command: Ctrl-C then is a line too."""
    program = (
        "class Interrupting:\n"
        "    def find_spec(name, path, target=None):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting)"
    )
    done = run_entry(program, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "ssdgen: interrupted\n")


def test_sigterm_leaves_no_folder_behind(tmp_path: Path) -> None:
    program = (
        "import os, signal, time; from ssdgen import pipeline; from ssdgen.run.load import load\n"
        "def loading(spec):\n"
        "    load('m', {'m.py': ''}); assert os.listdir(os.environ['TMPDIR'])\n"
        "    os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)\n"
        "pipeline.read = loading"
    )
    done = run_entry(program, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "")
    assert os.listdir(tmp_path) == []


def test_a_closed_pipe_is_quiet() -> None:
    """`ssdgen check mamba2 --json | head -n 1`: the reader has left before we write."""
    command = subprocess.Popen(
        [*COMMAND, "check", "mamba2", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT
    )
    assert command.stdout is not None
    assert command.stderr is not None
    command.stdout.close()
    assert command.stderr.read() == b""
    assert command.wait(timeout=60) == 141


def on_a_terminal(*arguments: str, **environment: str) -> bytes:
    """What a command writes to a terminal, standard output and error together."""
    ours, its = pty.openpty()
    env = {k: v for k, v in ENVIRONMENT.items() if k not in ("NO_COLOR", "FORCE_COLOR")} | {"TERM": "xterm-256color"}
    with subprocess.Popen([*COMMAND, *arguments], stdout=its, stderr=its, stdin=its, env=env | environment) as command:
        os.close(its)
        written = b""
        while True:
            try:
                more = os.read(ours, 65536)
            except OSError:  # Linux says EIO when the other side has closed
                break
            if not more:
                break
            written += more
        command.wait(timeout=60)
    os.close(ours)
    return written


def test_colour_only_on_a_terminal() -> None:
    assert b"\x1b[31m" in on_a_terminal("check", "nosuch")
    assert b"\x1b" not in on_a_terminal("check", "nosuch", NO_COLOR="1")
    piped = subprocess.run([*COMMAND, "check", "nosuch"], capture_output=True, check=False, env=ENVIRONMENT)
    assert b"\x1b" not in piped.stderr


def test_text_that_the_terminal_cannot_show() -> None:
    """A title in another script does not stop a command whose output is ASCII."""
    environment = {**ENVIRONMENT, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    result = subprocess.run([*COMMAND, "check", "no\u00e9"], capture_output=True, check=False, env=environment)
    assert result.returncode == 1
    assert b"no?" in result.stderr


def test_checking_loads_no_heavy_library() -> None:
    """What keeps `ssdgen check` under a second."""
    program = (
        "import sys; from ssdgen.cli.outcome import run; code = run(['check', 'mamba2']); "
        "loaded = {'torch', 'cuda', 'sympy', 'jinja2', 'numpy'} & set(sys.modules); "
        "assert not loaded, loaded; sys.exit(code)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False, env=ENVIRONMENT)
    assert result.returncode == 0, result.stderr.decode()


def test_deriving_and_planning_load_no_torch() -> None:
    """Everything up to emission works on a machine without it."""
    program = (
        "import sys; from ssdgen.cli.outcome import run; codes = [run([c, 'mamba2']) for c in ('derive', 'plan', 'generate')]; "
        "loaded = {'torch', 'cuda', 'numpy'} & set(sys.modules); assert not loaded, loaded; assert codes == [0, 0, 0]"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, check=False, env=ENVIRONMENT)
    assert result.returncode == 0, result.stderr.decode()
