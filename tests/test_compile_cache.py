"""Where compiled programs are kept between starts."""

from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from paged_jax.compile_cache import VARIABLE, default_folder, use_compile_cache

SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@pytest.fixture(autouse=True)
def settings():
    """JAX's settings are as they were, afterwards."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_it_is_in_the_users_cache_folder_by_default(monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert use_compile_cache() == default_folder()
    assert default_folder().parent == tmp_path / "paged-jax" and default_folder().is_dir()
    assert jax.config.jax_compilation_cache_dir == str(default_folder())


def test_what_is_compiled_is_kept_there(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "new"))
    jax.jit(lambda x: x + 1)(1)  # JAX has settled on no cache by now
    use_compile_cache()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.jit(lambda x: x * 3 + 1)(1)
    assert list((tmp_path / "new").glob("*-cache"))


@pytest.mark.parametrize("value", ["off", "OFF", "0", " no "])
def test_it_can_be_turned_off(monkeypatch, value):
    monkeypatch.setenv(VARIABLE, value)
    assert use_compile_cache() is None and jax.config.jax_compilation_cache_dir is None


def test_a_folder_of_the_users_own_stays(monkeypatch, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    for value in ("off", "/elsewhere"):
        monkeypatch.setenv(VARIABLE, value)
        assert use_compile_cache() == tmp_path
    assert jax.config.jax_compilation_cache_dir == str(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file"))
    with pytest.warns(UserWarning, match=f"{VARIABLE}=.*file: is no folder"):
        assert use_compile_cache() is None
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert use_compile_cache() is None  # nobody has asked for it: no warning


def test_without_a_home_nothing_is_kept_and_a_folder_asked_for_is_named(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("PAGED_JAX_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert use_compile_cache() is None
    monkeypatch.setenv("PAGED_JAX_CACHE", "~no-such-user/x")
    with pytest.warns(UserWarning, match="PAGED_JAX_CACHE=~no-such-user/x: is no folder"):
        assert use_compile_cache() is None


def test_a_relative_cache_home_is_ignored(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert default_folder().is_relative_to(Path.home())
