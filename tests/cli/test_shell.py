"""Completions and the manual page, made from the help: whole, and well formed."""

import re
import shutil
import subprocess

import pytest
from cli_support import fine, refused

SHELLS = ["bash", "zsh", "fish"]


def listed(text, heading):
    """The first words of a section of --help."""
    section = re.search(rf"^{heading}:\n((?:  .*\n)+)", text, re.M)
    return re.findall(r"^  (\S+)", section[1], re.M) if section else []


def options_of(*command):
    names = []
    for word in listed(fine(*command, "--help"), "Options"):
        names += [name.split("{")[0] for name in word.split(",")]
    assert "--help" in names and "--quiet" in names
    return names


COMMANDS = listed(fine("--help"), "Subcommands")


def test_there_are_commands():
    assert {"info", "explain", "attend", "check", "cache", "prebuild", "completion"} <= set(COMMANDS)


def part_of(script, shell, command):
    """What a script says of one command, options as they are typed."""
    if shell == "fish":
        lines = [x for x in script.splitlines() if f"__fish_seen_subcommand_from {command}'" in x]
        return re.sub(r" -([ls]) (\S+)", lambda x: f" {'--' if x[1] == 'l' else '-'}{x[2]}",
                      "\n".join(lines))
    return re.search(rf"^    {command}\)\n(.*?)\n      ;;$", script, re.M | re.S)[1]


@pytest.mark.parametrize("shell", SHELLS)
def test_completions_name_every_command_and_option(shell):
    script = fine("completion", shell)
    for command in COMMANDS:
        part = part_of(script, shell, command)
        for option in options_of(command):
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", part), (command, option)


@pytest.mark.parametrize("shell", SHELLS)
def test_completions_are_well_formed(shell, tmp_path):
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not here")
    (tmp_path / "script").write_text(fine("completion", shell))
    done = subprocess.run([shell, "-n", "script"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr


def completed(line, cwd):
    """What bash would offer at the end of a line."""
    (cwd / "script").write_text(fine("completion", "bash"))
    program = ('source ./script; compopt() { :; }; COMP_LINE=$1 COMP_POINT=${#1}; _regard; '
               'printf "%s\\n" "${COMPREPLY[@]}"')
    done = subprocess.run(["bash", "-c", program, "bash", line], cwd=cwd, capture_output=True,
                          text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(("line", "offers"), [
    ("regard at", ["attend"]),
    ("regard --quiet at", ["attend"]),
    ("regard attend --lay", ["--layout"]),
    ("regard attend --layout ", ["bhsd", "bshd"]),
    ("regard attend x.safetensors --layout bs", ["bshd"]),
    ("regard check --backend cpu:sc", ["scalar"]),  # readline has taken what stands before the :
    ("regard attend --causal=t", ["top-left"]),
    ("regard cache l", ["list"]),
    ("regard completion z", ["zsh"]),
    ("regard attend --scale ", []),
    ("regard attend --out ", []),  # files, which bash adds
])
def test_bash_completes(line, offers, tmp_path):
    assert completed(line, tmp_path) == offers


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not here")
@pytest.mark.parametrize(("line", "offers"), [
    ("regard at", {"attend"}), ("regard attend --layout ", {"bhsd", "bshd"}),
    ("regard cache l", {"list"}), ("regard check --probl", {"--problem", "--problems"})])
def test_fish_completes(line, offers, tmp_path):
    (tmp_path / "script").write_text(fine("completion", "fish"))
    program = f"source script; complete -C '{line}'"
    done = subprocess.run(["fish", "--no-config", "-c", program], cwd=tmp_path, capture_output=True,
                          text=True, check=True)
    assert {text.split("\t")[0] for text in done.stdout.splitlines()} == offers


def test_an_unknown_shell_is_refused():
    assert "tcsh" in refused("completion", "tcsh")


def test_the_manual_names_every_command_and_option():
    page = fine("manual")
    assert page.startswith(".TH REGARD 1")
    for command in COMMANDS:
        section = re.search(rf"^\.SS regard {command}\n(.*?)(?=^\.S[SH] )", page, re.M | re.S)[1]
        for option in options_of(command):
            assert option.replace("-", "\\-") in section, (command, option)
    for heading in ("NAME", "SYNOPSIS", "JSON", "EXIT STATUS", "ENVIRONMENT"):
        assert f".SH {heading}\n" in page


def test_the_manual_is_well_formed(tmp_path):
    (tmp_path / "regard.1").write_text(fine("manual"))
    checked = 0
    for command in (["mandoc", "-T", "lint"], ["man", "--warnings", "-l"]):
        if not shutil.which(command[0]):
            continue
        checked += 1
        done = subprocess.run([*command, "regard.1"], cwd=tmp_path, capture_output=True, text=True,
                              env={"PATH": "/usr/bin:/bin", "LC_ALL": "C", "MANPAGER": "cat"})
        complaints = (done.stdout if command[0] == "mandoc" else done.stderr).splitlines()
        assert [c for c in complaints if "missing date" not in c] == []
    if not checked:
        pytest.skip("neither mandoc nor man is here")
