"""Where the controller keeps its things, who may read them, and what it refuses to start with."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import socket
import stat
import tempfile
import threading
from pathlib import Path

import pytest
from disks import break_disk, fill, real_disk, small_disk
from fastapi import FastAPI

from holdfast_controller.cli.connection import Connection
from holdfast_controller.data_directory import (
    DataDirectory,
    DataDirectoryError,
    ServerFile,
    default_data_directory,
    make_token,
    read_token,
)
from holdfast_controller.server import Controller, StartupError, bind, claim, serve
from holdfast_controller.settings import SettingsError, load_cluster_settings, load_settings, unknown_names
from holdfast_controller.visible_gpus import gpus_present, gpus_shown


def test_the_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    settings = load_settings()
    assert settings.data_dir == tmp_path / ".local/share/holdfast"
    assert (settings.listen_host, settings.listen_port) == ("127.0.0.1", 8765)
    assert settings.cpu_slots == len(os.sched_getaffinity(0))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    assert default_data_directory() == tmp_path / "xdg/holdfast"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert default_data_directory() == tmp_path / ".local/share/holdfast"


def test_a_flag_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_LISTEN_PORT", "9000")
    monkeypatch.setenv("HOLDFAST_LOG_LEVEL", "DEBUG")
    assert load_settings().listen_port == 9000
    assert load_settings(listen_port=9001).listen_port == 9001
    assert load_settings().log_level == "debug"


@pytest.mark.parametrize("name", ["kubeconfig", "pod_namespace", "pod_name"])
def test_a_variable_of_holdfasts_own_wins_over_one_that_others_read_too(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name.upper(), "theirs")
    assert getattr(load_cluster_settings(), name) == "theirs"
    monkeypatch.setenv(f"HOLDFAST_{name.upper()}", "ours")
    assert getattr(load_cluster_settings(), name) == "ours"
    assert getattr(load_cluster_settings(**{name: "flag"}), name) == "flag"
    monkeypatch.setenv(f"HOLDFAST_{name.upper()}", "")
    assert getattr(load_cluster_settings(), name) == "theirs"


def test_a_log_level_may_be_written_in_capitals_wherever_the_controller_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOLDFAST_LOG_LEVEL", "INFO")
    assert load_settings().log_level == load_cluster_settings().log_level == "info"


def test_a_variable_that_is_set_to_nothing_is_not_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As compose files and shells leave one: jobs went into the current directory, where no command looked
    for them, and an empty port was an error."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    given = load_settings()
    for name in type(given).model_fields:
        monkeypatch.setenv(f"HOLDFAST_{name.upper()}", "")
    assert load_settings() == given
    assert load_settings().data_dir == default_data_directory()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"listen_host": ""}, r"listen_host \(HOLDFAST_LISTEN_HOST\) is '': .* at least 1 character"),
        (
            {"listen_port": 70000},
            r"listen_port \(HOLDFAST_LISTEN_PORT\) is 70000: .* less than or equal to 65535",
        ),
        ({"cpu_slots": 0}, r"cpu_slots \(HOLDFAST_CPU_SLOTS\) is 0: .* greater than or equal to 1"),
        ({"log_limit": "100m"}, "is '100m': write it like 1Gi"),  # a tenth of a byte: no limit
        ({"log_limit": "2GB"}, r"log_limit \(HOLDFAST_LOG_LIMIT\) is '2GB': write it like 1Gi, which"),
        ({"currency": "usd"}, r"currency \(HOLDFAST_CURRENCY\) is 'usd': write it like USD"),
        ({"log_level": "loud"}, r"log_level \(HOLDFAST_LOG_LEVEL\) is 'loud'"),
        ({"no_token": True, "listen_host": "0.0.0.0"}, "refusing to listen on 0.0.0.0 without a token"),
        ({"no_token": True, "listen_host": "gpu-box"}, "refusing to listen on gpu-box without a token"),
        ({"no_token": True, "listen_host": "::"}, "drop --no-token"),
    ],
)
def test_what_it_refuses_to_start_with(flags: dict[str, object], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        load_settings(**flags)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_without_a_token_on_loopback_only(host: str) -> None:
    assert load_settings(no_token=True, listen_host=host).no_token


def test_a_misspelt_variable_is_told() -> None:
    told = unknown_names({"HOLDFAST_LISTEN_PROT": "1", "HOLDFAST_RUN_DIR": "/x", "HOLDFAST_SERVER": "y"})
    assert told == ["HOLDFAST_LISTEN_PROT is no setting; did you mean HOLDFAST_LISTEN_PORT?"]


def test_what_a_training_in_a_bucket_is_told_by_the_environment_is_no_misspelt_variable() -> None:
    """Who keeps it in his profile was asked whether he did not mean HOLDFAST_DATA_DIR."""
    assert unknown_names({"HOLDFAST_LOCAL_DIR": "/x", "HOLDFAST_STORAGE_TIMEOUT_SECONDS": "60"}) == []


def test_gpus_are_those_that_the_driver_lists(tmp_path: Path) -> None:
    proc, dev = tmp_path / "proc", tmp_path / "dev"
    dev.mkdir()
    assert gpus_present(proc, dev) == []
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (dev / name).touch()
    assert gpus_present(proc, dev) == ["", ""]
    for bus, uuid in (("0000:81:00.0", "GPU-8f"), ("0000:01:00.0", "GPU-1a2b"), ("0000:41:00.0", "")):
        (proc / bus).mkdir(parents=True)
        if uuid:
            (proc / bus / "information").write_text(f"Model: \t NVIDIA H100\nGPU UUID: \t {uuid}\n")
    assert gpus_present(proc, dev) == ["GPU-1a2b", "", "GPU-8f"]


def test_a_gpu_that_the_driver_leaves_alone_has_no_number_and_one_that_nobody_has_used_no_uuid(
    tmp_path: Path,
) -> None:
    """A job was given the number of a GPU that CUDA does not have; question marks were taken for a name."""
    told = "Model: \t NVIDIA A100\nGPU UUID: \t {}\nBus Location: \t 0000:01:00.0\nGPU Excluded:\t {}\n"
    unknown = "GPU-????????-????-????-????????????"
    gpus = (("01", "GPU-1a", "Yes"), ("41", unknown, "No"), ("81", "GPU-8f", "No"))
    for bus, uuid, excluded in gpus:
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(told.format(uuid, excluded))
    assert gpus_present(tmp_path) == ["", "GPU-8f"]


@pytest.mark.parametrize(
    ("visible", "shown"),
    [
        (None, (0, 1, 2, 3)),
        ("", ()),
        ("-1", ()),
        ("2,3", (2, 3)),
        (" 3, 1 ", (3, 1)),
        ("1,-1,2", (1,)),
        ("GPU-1a2b3c", (0,)),
        ("GPU-8,2", (3, 2)),
    ],
)
def test_jobs_get_no_gpu_that_is_hidden(visible: str | None, shown: tuple[int, ...]) -> None:
    assert gpus_shown(["GPU-1a2b3c", "GPU-1a2b4d", "", "GPU-8f"], visible) == shown


@pytest.mark.parametrize(
    ("visible", "told"),
    [
        ("0,7", "7 is none of the 4 GPUs of this machine; name whole ones by their number or UUID"),
        ("MIG-aa", "MIG-aa is none of the 4"),
        ("GPU-1a2b", "GPU-1a2b is none of the 4"),
        ("GPU-c", "does not tell yet which GPU GPU-c is; name whole ones by their number, as nvidia-smi -L"),
        ("1,GPU-1a2b4d", "GPU-1a2b4d is there twice; name each GPU once"),
    ],
)
def test_what_shows_no_gpu_of_this_machine_is_refused(visible: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        gpus_shown(["GPU-1a2b3c", "GPU-1a2b4d", "", "GPU-8f"], visible)
    assert gpus_shown([], visible) == (), "there is nothing to hide"


def test_a_uuid_that_no_gpu_of_this_machine_has_is_refused() -> None:
    with pytest.raises(ValueError, match="GPU-aa is none of the 1 GPUs of this machine"):
        gpus_shown(["GPU-1a2b3c"], "GPU-aa")


def test_the_settings_have_the_gpus_that_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("holdfast_controller.settings.gpus_present", list)
    assert load_settings().devices == ()
    assert load_settings(gpus=2).devices == (0, 1), "who says it knows"
    monkeypatch.setattr("holdfast_controller.settings.gpus_present", lambda: [""] * 4)
    assert load_settings().devices == (0, 1, 2, 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert load_settings().devices == (2, 3)
    assert load_settings(gpus=1).devices == (2,)
    with pytest.raises(
        SettingsError, match=r"gpus \(HOLDFAST_GPUS\) is 4: CUDA_VISIBLE_DEVICES is '2,3' and sh"
    ):
        load_settings(gpus=4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    with pytest.raises(SettingsError, match=r"^CUDA_VISIBLE_DEVICES is .4.: 4 is none of the 4 GPUs"):
        load_settings()


# -------------------------------------------------------------------- token


def test_the_token_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "data/token"
    old = os.umask(0o000)
    try:
        make_token(path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    token = read_token(path)
    make_token(path)
    assert read_token(path) == token
    assert list(path.parent.iterdir()) == [path]


def test_no_token_is_made_where_a_file_system_keeps_no_modes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a stick: neither the chmod nor the new token that a token open to others is told to get helps.
    Files that come with the mode of such a file system stand for it."""
    private = tempfile.mkstemp

    def shown_to_all(prefix: str, dir: Path) -> tuple[int, str]:
        descriptor, path = private(prefix=prefix, dir=dir)
        os.fchmod(descriptor, 0o777)
        return descriptor, path

    monkeypatch.setattr(tempfile, "mkstemp", shown_to_all)
    with pytest.raises(DataDirectoryError, match=r"keeps no modes, as FAT and NTFS do not.* --data-dir"):
        make_token(tmp_path / "token")
    assert list(tmp_path.iterdir()) == []


def test_two_first_starts_at_once_agree_on_one_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    tokens = []
    barrier = threading.Barrier(2)

    def start(name: str) -> None:
        barrier.wait()
        make_token(path)
        tokens.append(read_token(path))

    threads = [threading.Thread(target=start, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tokens) == 2
    assert len(set(tokens)) == 1


@pytest.mark.parametrize(
    ("text", "mode", "told"),
    [
        (None, 0, "no token file at .*: `holdfast up` makes one"),
        ("x" * 43, 0o644, "has mode 0644, so others on this machine can use it: `chmod 600 "),
        ("x" * 43, 0o660, "has mode 0660"),
        ("", 0o600, "of at least 16 characters: name the one that `holdfast up` prints; if it is"),
        ("short", 0o600, "holds no token of at least 16 characters"),
        ("a text of somebody's own", 0o644, "holds no token of at least 16 characters"),
    ],
)
def test_a_token_file_that_is_no_good(tmp_path: Path, text: str | None, mode: int, told: str) -> None:
    path = tmp_path / "token"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(DataDirectoryError, match=told):
        read_token(path)


# ----------------------------------------------------------------- start-up


def test_a_claim_is_exclusive_and_is_given_back(tmp_path: Path) -> None:
    settings = load_settings(data_dir=tmp_path / "data", listen_port=0)
    with claim(settings) as listening:
        found = listening.directory.read_server_file()
        assert found == ServerFile(listening.url, str(tmp_path / "data/token"), os.getpid())
        with (
            pytest.raises(
                DataDirectoryError, match=rf"another controller already uses .* \(process {os.getpid()}"
            ),
            claim(settings),
        ):
            pass
        assert listening.directory.read_server_file() == found, "the second one changed nothing"
    assert listening.directory.read_server_file() is None
    with claim(settings):
        pass


def test_a_port_in_use(tmp_path: Path) -> None:
    with claim(load_settings(data_dir=tmp_path / "a", listen_port=0)) as first:
        port = int(first.url.rsplit(":", 1)[1])
        with (
            pytest.raises(StartupError, match=rf"port {port} on 127.0.0.1 is in use: .* --port {port + 1}"),
            claim(load_settings(data_dir=tmp_path / "b", listen_port=port)),
        ):
            pass
        assert DataDirectory(tmp_path / "b").read_server_file() is None


def test_an_address_that_is_not_ours() -> None:
    """One with a typo, which no machine can have for its name, was a traceback."""
    with pytest.raises(StartupError, match=r"cannot listen on 203\.0\.113\.1 port 0: "):
        bind("203.0.113.1", 0)
    for host in ("no-such-host.invalid", "127.0..1", "x" * 64):
        with pytest.raises(StartupError, match=rf"cannot listen on '{host}': .*; give another --host"):
            bind(host, 0)


@pytest.mark.parametrize("ipv6", [True, False])
def test_all_addresses_are_those_of_ipv6_and_ipv4(monkeypatch: pytest.MonkeyPatch, ipv6: bool) -> None:
    """As in the chart: there are clusters without IPv4, and nodes whose kernel has no IPv6."""
    if ipv6 and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: ipv6)
    with contextlib.closing(bind("::", 0)) as bound:
        port = bound.getsockname()[1]
        for host in ("127.0.0.1", "::1") if ipv6 else ("127.0.0.1",):
            socket.create_connection((host, port), timeout=60).close()


def test_a_data_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(DataDirectoryError, match=r"cannot make the data directory .*: .*--data-dir"),
        claim(load_settings(data_dir=tmp_path / "file/data", listen_port=0)),
    ):
        pass


def test_a_disk_that_is_full_at_a_start_is_named_with_the_file_and_room_helps(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        data = disk / "data"
        data.mkdir()
        settings = load_settings(data_dir=data, listen_port=0)

        def refused() -> str:
            fill(disk / "filler")
            with pytest.raises(DataDirectoryError) as told, claim(settings):
                pass
            (disk / "filler").unlink()
            return str(told.value)

        advice = "No space left on device; free some space, or give another data directory with --data-dir"
        assert refused() == f"cannot write {data / 'token'}: {advice}"
        with claim(settings) as listening:
            token = listening.token
            assert token
        assert refused() == f"cannot write {data / 'server.json'}: {advice}"
        with claim(settings) as listening:
            assert listening.token == token


def test_a_disk_that_fails_under_a_controller_is_told_by_the_next_start(tmp_path: Path) -> None:
    """The end of the one that ran was a traceback: it could not remove what says where it answers."""
    with real_disk(tmp_path / "disk", 8 << 20) as disk:
        settings = load_settings(data_dir=disk / "data", listen_port=0)
        with claim(settings):
            break_disk(disk)
        with pytest.raises(DataDirectoryError) as told, claim(settings):
            pass
        assert str(told.value) == (
            f"cannot write {disk}/data/lock: Read-only file system; mount its file system for writing, or "
            "give another data directory with --data-dir"
        )


def test_a_controller_that_cannot_say_where_it_answers_ends_with_the_reason(tmp_path: Path) -> None:
    """As where its output goes to a full disk: it ended as if it had been asked to."""

    def announce() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "up.out")

    async def reconcile() -> None:
        await asyncio.Event().wait()

    async def story() -> None:
        controller = Controller(FastAPI(), asyncio.Event(), reconcile)
        with claim(load_settings(data_dir=tmp_path, listen_port=0)) as listening:
            await serve(controller, listening.socket, announce, asyncio.Event())

    with pytest.raises(OSError, match="No space left"):
        asyncio.run(story())


def test_a_copy_of_a_data_directory_does_not_lead_to_the_controller_of_the_original(tmp_path: Path) -> None:
    """Its jobs have the same names: whoever tried out a backup, or tidied one up, deleted what ran."""
    first, copy, moved = (tmp_path / name for name in ("first", "copy", "moved"))
    with claim(load_settings(data_dir=first, listen_port=0)) as listening:
        shutil.copytree(first, copy)
        assert Connection(None, None, first).address() == listening.url
        with pytest.raises(DataDirectoryError, match=f"no controller runs with the data directory {copy}"):
            Connection(None, None, copy).client()
        with claim(load_settings(data_dir=copy, listen_port=0)) as other:
            assert Connection(None, None, copy).address() == other.url
        first.rename(moved)
        assert Connection(None, None, moved).address() == listening.url
        first.symlink_to(moved)
        assert Connection(None, None, moved).address() == listening.url


def test_a_copy_that_is_the_usual_directory_leads_to_no_other_controller_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a home restored from a backup: that of the original, at the usual port, took its token."""
    first, home = tmp_path / "first", tmp_path / "home"
    monkeypatch.setenv("XDG_DATA_HOME", str(home))
    with claim(load_settings(data_dir=first, listen_port=0)) as listening:
        Connection().client()  # nothing is there: whoever answers at the usual port is asked without a token
        shutil.copytree(first, home / "holdfast")
        with pytest.raises(DataDirectoryError, match=f"no controller runs with .* {home}/holdfast: "):
            Connection().client()
        assert Connection(listening.url, first / "token").client().server == listening.url
        shutil.rmtree(first)
        Connection().client()


def test_a_server_file_of_another_kind_is_no_server(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path)
    for text in ("", "[]", "{}", "\x00", '{"url": "x", "tokenFile": null, "pid": "y"}'):
        directory.server_file.write_text(text)
        assert directory.read_server_file() is None
