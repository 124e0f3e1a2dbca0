"""The standard library as text: the same order everywhere, whole files, and a text that no version changes."""

from __future__ import annotations

import hashlib

import pytest
import torch

from ringlearn import text


def test_files_are_sorted_unique_and_without_tests_or_installed_packages():
    files = text.standard_library_files()
    assert list(files) == sorted(set(files)) and len(files) > 300
    assert {"this.py", "heapq.py", "json/decoder.py"} <= set(files)
    parts = {part for name in files for part in name.split("/")}
    assert not parts & {"test", "tests", "site-packages", "dist-packages", "__pycache__"}
    assert not any(name.startswith("_sysconfigdata") for name in files)  # they name this machine's folders


def test_bytes_are_the_files_in_order_and_a_limit_is_a_prefix():
    files = text.standard_library_files()
    first = b"".join(text.read(name) for name in files[:5])
    assert text.standard_library_bytes(len(first)) == first
    assert text.standard_library_bytes(len(first) - 3) == first[:-3]
    assert text.standard_library_bytes(0) == b""
    assert len(text.standard_library_bytes()) > 5_000_000


def test_line_ends_do_not_depend_on_the_platform(tmp_path, monkeypatch):
    (tmp_path / "this.py").write_bytes(b"a\r\nb\n")
    monkeypatch.setattr(text, "_root", lambda: tmp_path)
    text.standard_library_files.cache_clear()
    try:
        assert text.standard_library_files() == ("this.py",) and text.read("this.py") == b"a\nb\n"
    finally:
        monkeypatch.undo()
        text.standard_library_files.cache_clear()


def test_the_zen_is_the_same_in_every_version_of_python():
    assert hashlib.sha256(text.zen()).hexdigest() == "e250f274f33b9b621a04264025d50e5fb9b1f989f444d13bb373882e734e996f"


def test_tensors_and_back():
    data = bytes(range(256))
    tokens = text.to_tensor(data)
    assert tokens.dtype == torch.int64 and tokens.tolist() == list(range(256))
    assert text.to_bytes(tokens) == data and text.to_bytes(text.to_tensor(b"")) == b""


def test_context_scores_are_dot_products_of_one_hot_contexts():
    data, position, width = text.zen(), 655, 8
    hot = torch.nn.functional.one_hot(text.to_tensor(data), 256).float()
    query = hot[position - width : position].flatten()
    keys = torch.stack([hot[j : j + width].flatten() for j in range(position - width)])
    assert torch.equal(text.context_scores(data, position, width), keys @ query)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: text.read("no_such.py"), "got 'no_such.py'"),
        (lambda: text.read("../secret.py"), "expected a file of the standard library"),
        (lambda: text.standard_library_bytes(-1), "limit must be 0 or more, got -1"),
        (lambda: text.standard_library_bytes(10**12), "got limit=1000000000000"),
        (lambda: text.to_bytes(torch.tensor([256])), "0..255, got 256"),
        (lambda: text.context_scores(b"abc", 3, width=3), "width=3 and position=3"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)


def test_a_python_without_source_files_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match="not one packed into a zip"):
        text._root()
