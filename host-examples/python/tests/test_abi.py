"""Structs, constants and signatures against what a C compiler makes of the header."""

import ctypes
import os
import re
import shutil
import subprocess

import pytest
from conftest import REPOSITORY

from video_vae import _abi
from video_vae._library import library

HEADER = REPOSITORY / "include" / "video_vae.h"
CONSTANTS = [name for name in dir(_abi) if name.startswith("VVAE_")]


def test_every_name_of_the_header_is_known():
    text = "\n".join(line.split("//")[0] for line in HEADER.read_text(encoding="utf-8").splitlines())
    functions = set(re.findall(r"^(?:u?int\d+_t|const char \*)\s?(vvae_\w+)\(", text, re.MULTILINE))
    assert functions == set(_abi.SIGNATURES)
    structs = set(re.findall(r"^} (vvae_\w+);", text, re.MULTILINE))
    assert structs == {struct.__name__ for struct in _abi.STRUCTS}
    assert set(re.findall(r"^#define (VVAE_\w+)", text, re.MULTILINE)) == set(CONSTANTS)


def test_layouts_and_constants_are_those_of_c(tmp_path):
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        assert "CI" not in os.environ, "no C compiler"
        pytest.skip("no C compiler")
    expected, lines = {}, []
    for struct in _abi.STRUCTS:
        name = struct.__name__
        expected[name] = ctypes.sizeof(struct)
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field, _ in struct._fields_:
            member = getattr(struct, field)
            expected[f"{name}.{field}.offset"], expected[f"{name}.{field}.size"] = member.offset, member.size
            lines.append(f'printf("{name}.{field}.offset %zu\\n", offsetof({name}, {field}));')
            lines.append(f'printf("{name}.{field}.size %zu\\n", sizeof((({name} *)0)->{field}));')
    for name in CONSTANTS:
        expected[name] = getattr(_abi, name)
        lines.append(f'printf("{name} %lld\\n", (long long)({name}));')
    source = tmp_path / "layout.c"
    body = "\n    ".join(lines)
    includes = '#include <stddef.h>\n#include <stdio.h>\n#include "video_vae.h"\n'
    source.write_text(f"{includes}int main(void) {{\n    {body}\n    return 0;\n}}\n")
    program = tmp_path / "layout"
    subprocess.run([compiler, "-I", str(HEADER.parent), str(source), "-o", str(program)], check=True)
    output = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    assert {name: int(value) for name, value in (line.split() for line in output.splitlines())} == expected


def test_fields_are_those_of_the_header():
    text = HEADER.read_text(encoding="utf-8")
    for struct in _abi.STRUCTS:
        body = re.search(r"typedef struct \{([^}]*)\} " + struct.__name__ + ";", text).group(1)
        body = "\n".join(line.split("//")[0] for line in body.splitlines())
        fields = re.findall(r"(\w+)(?:\[\d+\])?;", body)
        assert fields == [field for field, _ in struct._fields_], struct.__name__


def test_a_library_that_is_not_there_is_told_with_its_name(monkeypatch, tmp_path):
    from video_vae import _library

    monkeypatch.setenv("VIDEO_VAE_LIBRARY", str(tmp_path / "absent.so"))
    with pytest.raises(ImportError, match=r"absent\.so.*VIDEO_VAE_LIBRARY"):
        _library.find()


def test_the_library_speaks_this_abi():
    assert library().vvae_abi_version() >> 16 == _abi.VVAE_ABI_MAJOR
