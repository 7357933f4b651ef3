"""The embedded target: where its files are kept."""

from pathlib import Path

from heads.embedded import cache_root


def test_a_cache_below_home_is_below_home_however_it_was_set(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HEADSTART_CACHE", "~/models")  # quoted in a shell or an .env file, nobody expands it
    assert cache_root() == tmp_path / "models"
    monkeypatch.delenv("HEADSTART_CACHE")
    assert cache_root() == Path.home() / ".cache" / "headstart"
